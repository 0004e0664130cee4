/* The collective calls: check the arguments, announce a refusal to the other ranks, else hand the call to the backend. */
#include <string.h>

#include "backend/backend.h"
#include "base/error.h"

static mok_status check_tokens(const mok_workspace *w, int64_t num_tokens)
{
    if (num_tokens < 0 || num_tokens > w->config.max_tokens)
        return mk_fail(MOK_E_SHAPE, "num_tokens is %lld: it must be from 0 to max_tokens, which is %lld", (long long)num_tokens, (long long)w->config.max_tokens);
    return MOK_OK;
}

static mok_status check_pointer(const char *name, const void *pointer, bool needed)
{
    return needed && !pointer ? mk_fail(MOK_E_ARG, "%s is NULL", name) : MOK_OK;
}

static mok_status check_block(const char *name, const void *pointer, bool needed)
{
    MK_TRY(check_pointer(name, pointer, needed));
    if ((uintptr_t)pointer % MK_BUFFER_ALIGN)
        return mk_fail(MOK_E_ARG, "%s is not aligned to %d bytes", name, MK_BUFFER_ALIGN);
    return MOK_OK;
}

static mok_status check_weight(const char *name, const mok_weight *weight, bool needed)
{
    if (weight->packed && weight->experts)
        return mk_fail(MOK_E_ARG, "weights.%s has both packed and experts: give one", name);
    if (weight->scales || weight->transposed || weight->transposed_scales)
        return mk_fail(MOK_E_ARG, "weights.%s has MXFP8 parts: only the routed weights of a layer with dtype MOK_MXFP8 may", name);
    return needed && !weight->packed && !weight->experts ? mk_fail(MOK_E_ARG, "weights.%s has neither packed nor experts", name) : MOK_OK;
}

/* A routed weight of MXFP8: bf16, or quantised with the parts that the pass reads. */
static mok_status check_mx_weight(const mok_workspace *w, const char *name, const mok_weight *weight, bool needed, bool normal, bool transposed)
{
    const mok_config *c = &w->config;
    if (!mk_mx_is_quantised(weight))
        return check_weight(name, weight, needed);
    if (weight->experts)
        return mk_fail(MOK_E_UNSUPPORTED, "weights.%s has experts and MXFP8 parts: quantised weights must be packed", name);
    if (c->weight_layout != MOK_WEIGHT_NK || c->gate_up == MOK_GATE_UP_INTERLEAVED)
        return mk_fail(MOK_E_UNSUPPORTED, "weights.%s is quantised: weight_layout must be MOK_WEIGHT_NK and gate_up not interleaved (or give bf16)", name);
    if (!weight->packed != !weight->scales)
        return mk_fail(MOK_E_ARG, "weights.%s has %s but not %s: a quantisation is both", name, weight->packed ? "packed" : "scales",
                       weight->packed ? "scales" : "packed");
    if (!weight->transposed != !weight->transposed_scales)
        return mk_fail(MOK_E_ARG, "weights.%s has %s but not %s: a quantisation is both", name, weight->transposed ? "transposed" : "transposed_scales",
                       weight->transposed ? "transposed_scales" : "transposed");
    if (needed && normal && !weight->packed)
        return mk_fail(MOK_E_ARG, "weights.%s has no packed and scales, which this call reads", name);
    if (needed && transposed && !weight->transposed)
        return mk_fail(MOK_E_ARG, "weights.%s has no transposed and transposed_scales, which the backward reads", name);
    return MOK_OK;
}

/* Which routed weights a call reads: what the forward multiplies with of gate and up, and of down; what dgrad does, of all. In BF16 those are one. */
typedef struct weight_reads { bool gate_up, down, dgrad; } weight_reads;

static mok_status check_routed_weights(const mok_workspace *w, const mok_weights *weights, weight_reads reads)
{
    bool routed = w->dims.experts_count > 0, separate = w->config.gate_up == MOK_GATE_UP_SEPARATE, gate_up = routed && (reads.gate_up || reads.dgrad);
    const struct { const char *name; const mok_weight *weight; bool needed, normal; } all[] = {
        {"gate", &weights->gate, gate_up, reads.gate_up}, {"up", &weights->up, gate_up && separate, reads.gate_up},
        {"down", &weights->down, routed && (reads.down || reads.dgrad), reads.down}};
    for (int i = 0; i < 3; i++)
        MK_TRY(w->dims.mx ? check_mx_weight(w, all[i].name, all[i].weight, all[i].needed, all[i].normal, reads.dgrad)
                          : check_weight(all[i].name, all[i].weight, all[i].needed));
    return MOK_OK;
}

/* One quantisation of the routed weights, widened; read: the call multiplies with it. */
static mok_status check_wide(const mok_workspace *w, const char *name, const void *wide, bool read)
{
    if (wide && !w->plan.wide_bytes)
        return mk_fail(MOK_E_ARG, "%s is given, but plan.wide_bytes is 0: here passes read no widened weights", name);
    return check_block(name, wide, read && w->dims.mx_wide_given && w->plan.wide_bytes);
}

/* Takes out of `reads` what comes widened. */
static mok_status check_both_wide(const mok_workspace *w, const void *wide, const void *wide_dgrad, weight_reads *reads)
{
    MK_TRY(check_wide(w, "wide", wide, reads->gate_up || reads->down));
    MK_TRY(check_wide(w, "wide_dgrad", wide_dgrad, reads->dgrad));
    *reads = (weight_reads){reads->gate_up && !wide, reads->down && !wide, reads->dgrad && !wide_dgrad};
    return MOK_OK;
}

static mok_status check_weights(const mok_workspace *w, const mok_weights *weights, bool down, weight_reads reads)
{
    bool shared = w->dims.shared_intermediate > 0, separate = w->config.gate_up == MOK_GATE_UP_SEPARATE;
    MK_TRY(check_routed_weights(w, weights, reads));
    MK_TRY(check_weight("shared_gate", &weights->shared_gate, shared));
    MK_TRY(check_weight("shared_up", &weights->shared_up, shared && separate));
    MK_TRY(check_weight("shared_down", &weights->shared_down, shared && down));
    if (!separate && (weights->up.packed || weights->up.experts || weights->shared_up.packed || weights->shared_up.experts))
        return mk_fail(MOK_E_ARG, "weights.up is given, but gate_up is %s: gate and up are one matrix in weights.gate",
                       w->config.gate_up == MOK_GATE_UP_COMBINED ? "combined" : "interleaved");
    return check_pointer("weights.shared_output_gate", weights->shared_output_gate, w->config.shared_gate);
}

static mok_status check_grad(const char *name, const mok_grad *grad)
{
    if (grad->packed && grad->experts)
        return mk_fail(MOK_E_ARG, "grads.%s has both packed and experts: give one", name);
    if (grad->dtype != MOK_DTYPE_AUTO && grad->dtype != MOK_BF16 && grad->dtype != MOK_FP32)
        return mk_fail(MOK_E_ARG, "grads.%s.dtype is %d: it must be MOK_BF16 or MOK_FP32", name, (int)grad->dtype);
    return MOK_OK;
}

static mok_status check_grads(const mok_workspace *w, const mok_grads *g)
{
    MK_TRY(check_grad("gate", &g->gate));
    MK_TRY(check_grad("up", &g->up));
    MK_TRY(check_grad("down", &g->down));
    MK_TRY(check_grad("shared_gate", &g->shared_gate));
    MK_TRY(check_grad("shared_up", &g->shared_up));
    MK_TRY(check_grad("shared_down", &g->shared_down));
    MK_TRY(check_grad("shared_output_gate", &g->shared_output_gate));
    if (w->config.gate_up != MOK_GATE_UP_SEPARATE && (g->up.packed || g->up.experts || g->shared_up.packed || g->shared_up.experts))
        return mk_fail(MOK_E_ARG, "grads.up is given, but gate and up are one matrix: its gradient goes to grads.gate");
    return MOK_OK;
}

static mok_status check_schedule_args(const mok_workspace *w, const mok_schedule_args *a)
{
    MK_TRY(check_tokens(w, a->num_tokens));
    MK_TRY(check_pointer("expert_ids", a->expert_ids, a->num_tokens > 0));
    return check_block("schedule", a->schedule, true);
}

static mok_status check_forward_args(const mok_workspace *w, const mok_forward_args *a, bool recompute)
{
    bool tokens = a->num_tokens > 0;
    weight_reads reads = {.gate_up = true, .down = !recompute};
    MK_TRY(check_tokens(w, a->num_tokens));
    MK_TRY(check_block("schedule", a->schedule, true));
    MK_TRY(check_block("context", a->context, recompute));
    MK_TRY(check_pointer("x", a->x, tokens));
    MK_TRY(check_pointer("router_weights", a->router_weights, tokens && !recompute));
    MK_TRY(check_pointer("out", a->out, tokens && !recompute));
    MK_TRY(check_both_wide(w, a->wide, NULL, &reads));
    return check_weights(w, &a->weights, !recompute, reads);
}

static mok_status check_backward_args(const mok_workspace *w, const mok_backward_args *a)
{
    bool tokens = a->num_tokens > 0;
    weight_reads reads = {.gate_up = w->dims.saved_tiles < w->dims.capacity_tiles, .dgrad = true}; /* gate and up: for replayed rows */
    if (a->parts < MOK_BACKWARD_ALL || a->parts > MOK_BACKWARD_WEIGHTS)
        return mk_fail(MOK_E_ARG, "parts is %d: it must be MOK_BACKWARD_ALL, _DATA or _WEIGHTS", (int)a->parts);
    MK_TRY(check_tokens(w, a->num_tokens));
    MK_TRY(check_block("schedule", a->schedule, true));
    MK_TRY(check_block("context", a->context, true));
    MK_TRY(check_pointer("dout", a->dout, tokens));
    MK_TRY(check_pointer("x", a->x, tokens));
    MK_TRY(check_pointer("router_weights", a->router_weights, tokens));
    MK_TRY(check_pointer("dx", a->dx, tokens && a->parts != MOK_BACKWARD_WEIGHTS));
    MK_TRY(check_both_wide(w, a->wide, a->wide_dgrad, &reads));
    MK_TRY(check_weights(w, &a->weights, true, reads));
    return check_grads(w, &a->grads);
}

static mok_status run(mok_workspace *w, mk_call *call, mok_status checked, void *stream)
{
    if (w->broken)
        return mk_fail(MOK_E_STATE, "this workspace is broken: an earlier call ended half-way, or waited for another rank in vain; destroy it");
    if (checked == MOK_OK)
        checked = w->backend->check(w, call);
    if (checked != MOK_OK) {
        w->backend->refuse(w, call->operation, call->layer, checked, stream);
        return checked;
    }
    return w->backend->run(w, call, stream);
}

mok_status mok_schedule(mok_workspace *w, const mok_schedule_args *args, void *stream)
{
    MK_TRY(mk_check_workspace(w));
    mk_call call = {.operation = MK_OP_SCHEDULE};
    mok_status status = mk_read_struct("mok_schedule_args", args, &call.schedule, sizeof call.schedule);
    if (status == MOK_OK)
        status = check_schedule_args(w, &call.schedule);
    call.layer = call.schedule.layer;
    call.num_tokens = call.schedule.num_tokens;
    return run(w, &call, status, stream);
}

static mok_status run_forward(mok_workspace *w, const mok_forward_args *args, mk_operation operation, void *stream)
{
    MK_TRY(mk_check_workspace(w));
    mk_call call = {.operation = operation};
    mok_status status = mk_read_struct("mok_forward_args", args, &call.forward, sizeof call.forward);
    if (status == MOK_OK)
        status = check_forward_args(w, &call.forward, operation == MK_OP_RECOMPUTE);
    call.layer = call.forward.layer;
    call.num_tokens = call.forward.num_tokens;
    return run(w, &call, status, stream);
}

mok_status mok_forward(mok_workspace *w, const mok_forward_args *args, void *stream) { return run_forward(w, args, MK_OP_FORWARD, stream); }
mok_status mok_recompute(mok_workspace *w, const mok_forward_args *args, void *stream) { return run_forward(w, args, MK_OP_RECOMPUTE, stream); }

mok_status mok_backward(mok_workspace *w, const mok_backward_args *args, void *stream)
{
    MK_TRY(mk_check_workspace(w));
    mk_call call = {.operation = MK_OP_BACKWARD};
    mok_status status = mk_read_struct("mok_backward_args", args, &call.backward, sizeof call.backward);
    if (status == MOK_OK)
        status = check_backward_args(w, &call.backward);
    call.layer = call.backward.layer;
    call.num_tokens = call.backward.num_tokens;
    return run(w, &call, status, stream);
}

mok_status mok_mx_widen(mok_workspace *w, const mok_mx_widen_args *args, void *stream)
{
    mok_mx_widen_args a;
    MK_TRY(mk_check_workspace(w));
    MK_TRY(mk_read_struct("mok_mx_widen_args", args, &a, sizeof a));
    MK_TRY(check_wide(w, "wide", a.wide, false));
    MK_TRY(check_wide(w, "wide_dgrad", a.wide_dgrad, false));
    MK_TRY(check_routed_weights(w, &a.weights, (weight_reads){.gate_up = false})); /* none is needed */
    return w->backend->mx_widen(w, &a, stream);
}

mok_status mok_refuse(mok_workspace *w, mok_call_kind call, uint64_t layer, const char *sentence, void *stream)
{
    MK_TRY(mk_check_workspace(w));
    if (!sentence)
        return mk_fail(MOK_E_ARG, "sentence is NULL");
    if ((int)call < MOK_CALL_SCHEDULE || (int)call > MOK_CALL_BACKWARD)
        return mk_fail(MOK_E_ARG, "call is %d: it must be one of mok_call_kind", (int)call);
    if (w->broken)
        return mk_fail(MOK_E_STATE, "this workspace is broken: nobody waits for its calls");
    mok_status why = mk_fail(MOK_E_ARG, "%.400s", sentence);
    w->backend->refuse(w, (mk_operation)call, layer, why, stream);
    return w->broken ? mk_fail(MOK_E_STATE, "the other ranks could not be told: %.400s", sentence) : MOK_OK;
}

static mok_status wait(mok_workspace *w, bool block)
{
    MK_TRY(mk_check_workspace(w));
    return w->backend->wait(w, block);
}

mok_status mok_wait(mok_workspace *w) { return wait(w, true); }
mok_status mok_poll(mok_workspace *w) { return wait(w, false); }

mok_status mok_get_stats(mok_workspace *w, mok_stats *out)
{
    MK_TRY(mk_check_workspace(w));
    MK_TRY(w->backend->wait(w, true));
    return mk_write_struct("mok_stats", &w->stats, sizeof w->stats, out);
}

mok_status mok_schedule_query(mok_workspace *w, const void *schedule, mok_schedule_info *out)
{
    mk_schedule_head h;
    mok_schedule_info info;
    MK_TRY(mk_check_workspace(w));
    MK_TRY(check_block("schedule", schedule, true));
    MK_TRY(w->backend->schedule_head(w, schedule, &h));
    if (h.magic != MK_SCHEDULE_MAGIC || h.fingerprint != w->fingerprint)
        return mk_fail(MOK_E_STATE, "schedule was not filled by mok_schedule of this configuration");
    int64_t row = 2 * w->dims.hidden, token = MK_ROW_BYTES(&w->dims, w->dims.hidden);
    memset(&info, 0, sizeof info);
    info.tokens_global = h.tokens_global;
    info.rows = h.num_rows;
    info.table_rows = (int64_t)h.num_tiles * MK_ROW_TILE;
    info.rows_copied_fwd = h.rows_copied_fwd;
    info.rows_copied_bwd = h.rows_copied_bwd;
    info.rows_pulled_peer_fwd = h.rows_pulled_peer_fwd;
    info.rows_pulled_peer_bwd = h.rows_pulled_peer_bwd;
    info.wgrad_pieces = h.num_pieces;
    info.wgrad_continued = h.wgrad_continued;
    info.bytes_pulled_peer_fwd = h.rows_pulled_peer_fwd * token;
    info.bytes_pushed_peer_fwd = h.rows_peer * row;
    info.bytes_pulled_peer_bwd = h.rows_pulled_peer_bwd * 2 * token; /* x and dout */
    info.bytes_pushed_peer_bwd = h.rows_peer * (row + 4);          /* dx, and dw in fp32 */
    return mk_write_struct("mok_schedule_info", &info, sizeof info, out);
}
