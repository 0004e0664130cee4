/* The tensor maps of the GEMMs, and their tiles. A map is a pure function of addresses and sizes and is kept, so that a call with weights that
 * have come before encodes nothing, however many layers share the workspace. */
#include <string.h>

#include "base/error.h"
#include "cuda/host/state.h"

/* In rows or columns, as the tiles in cuda/gemm/tile.cuh: all are 128 rows. A cluster of two shares the rows of one and takes two column tiles; on
 * Blackwell (pair.cuh, always the wide tile) it shares the columns and takes two row tiles, whose tasks are counted one by one. */
enum { TILE_ROWS = 128, CLUSTER = 2, COLS_WIDE = 256, COLS_NARROW = 128, BLOCK_K = 64, BLOCK_K_MX = 128 };
/* Up to this contraction the narrow tile wins: its epilogue hides under the other warpgroup's MMAs. */
enum { NARROW_UP_TO = 4096 };
enum { MAP_BITS = 12 };
_Static_assert(1 << MAP_BITS == MK_CUDA_KEPT_MAPS, "a place for each hash");

static bool is_gate_up(mk_gemm_id id) { return id == MK_GEMM_GATE_UP || id == MK_GEMM_SHARED_GATE_UP; }
static bool is_shared(mk_gemm_id id) { return id == MK_GEMM_SHARED_GATE_UP || id == MK_GEMM_SHARED_DOWN; }
static int64_t width_of(const mk_dims *d, mk_gemm_id id) { return is_shared(id) ? d->shared_intermediate : d->intermediate; }

void mk_cuda_choose_tiles(mok_workspace *w, const char *wish)
{
    static const mk_cuda_kernel kernels[2][2][2] = {{{MK_CUDA_mok_s4_down_wide, MK_CUDA_mok_s4_down_narrow}, {MK_CUDA_mok_s2_gate_up_wide, MK_CUDA_mok_s2_gate_up_narrow}},
                                                    {{MK_CUDA_mok_s4_down_wide_mx, MK_CUDA_mok_s4_down_narrow_mx},
                                                     {MK_CUDA_mok_s2_gate_up_wide_mx, MK_CUDA_mok_s2_gate_up_narrow_mx}}};
    mk_cuda_state *s = w->state;
    for (int id = 0; id < MK_NUM_GEMMS; id++) {
        mk_cuda_gemm *g = &s->gemm[id];
        bool gate_up = is_gate_up((mk_gemm_id)id);
        int64_t width = width_of(&w->dims, (mk_gemm_id)id), depth = gate_up ? w->dims.hidden : width;
        g->narrow = depth <= NARROW_UP_TO;
        if (wish && !strcmp(wish, "wide"))
            g->narrow = false;
        if (wish && !strcmp(wish, "narrow"))
            g->narrow = true;
        if (s->fused)
            g->narrow = w->dims.mx;
        if (s->device->blackwell)
            g->narrow = false;
        g->kernel = kernels[w->dims.mx && !is_shared((mk_gemm_id)id)][gate_up][g->narrow];
        int32_t cols = g->narrow ? COLS_NARROW : COLS_WIDE;
        g->scaled = w->dims.mx_scaled && !is_shared((mk_gemm_id)id);
        g->num_cols = (int32_t)(gate_up ? width : w->dims.hidden);
        g->num_k_blocks = (int32_t)mk_ceil_div(depth, g->scaled ? BLOCK_K_MX : BLOCK_K);
        g->b_high_row = gate_up ? 0 : cols / 2;
        g->tasks_per_tile = mk_ceil_div(g->num_cols, (gate_up ? cols / 2 : cols) * (s->device->blackwell ? 1 : CLUSTER));
    }
}

/* The weights as stacks [experts, rows, cols]: gate and up may be halves of one matrix, or its even and odd rows. Routed ones of MXFP8: those in
 * `wide` (mk_cuda_wide). By pointer: one expert's, at no address of its own, as the device needs it. */
static void describe_weights(const mok_workspace *w, mk_gemm_id id, const mok_weights *m, const char *wide, uint32_t box, mk_tensor *low, mk_tensor *high)
{
    const mk_dims *d = &w->dims;
    bool shared = is_shared(id), own = mk_cuda_maps_experts(w, m, shared);
    uint64_t experts = shared || own ? 1 : (uint64_t)d->experts_count, width = (uint64_t)width_of(d, id), hidden = (uint64_t)d->hidden;
    if (d->mx && !shared) {
        const mk_memory *o = &w->memory;
        if (is_gate_up(id)) {
            *low = mk_tensor_operand(wide + o->wide_gate, hidden, width, experts, box);
            *high = mk_tensor_operand(wide + o->wide_up, hidden, width, experts, box);
        } else {
            *low = *high = mk_tensor_operand(wide + o->wide_down, width, hidden, experts, box);
        }
        return;
    }
    if (!is_gate_up(id)) {
        *low = *high = mk_tensor_operand(own ? w->local : shared ? m->shared_down.packed : m->down.packed, width, hidden, experts, box);
        return;
    }
    const char *gate = own ? w->local : shared ? m->shared_gate.packed : m->gate.packed, *up = own ? w->local : shared ? m->shared_up.packed : m->up.packed;
    if (!own && w->config.gate_up != MOK_GATE_UP_SEPARATE)
        up = gate + mk_cuda_up_offset(w, (int64_t)width);
    *low = mk_tensor_operand(gate, hidden, width, experts, box);
    *high = mk_tensor_operand(up, hidden, width, experts, box);
    if (w->config.gate_up == MOK_GATE_UP_SEPARATE)
        return;
    low->stride_bytes[1] = high->stride_bytes[1] = 2 * width * hidden * 2;
    if (w->config.gate_up == MOK_GATE_UP_INTERLEAVED)
        low->stride_bytes[0] = high->stride_bytes[0] = 2 * hidden * 2;
}

/* The rows that come in: ring_x or ring_h; for the shared expert this rank's tokens, as published or where the caller has them, or shared_h. */
static mk_tensor describe_rows(const mok_workspace *w, mk_gemm_id id, const void *x, int64_t num_tokens)
{
    const mk_memory *m = &w->memory;
    const mk_cuda_state *s = w->state;
    uint64_t cols = (uint64_t)(is_gate_up(id) ? w->dims.hidden : width_of(&w->dims, id));
    const char *address;
    switch (id) {
    case MK_GEMM_GATE_UP: address = w->local + m->ring_x; break;
    case MK_GEMM_DOWN: address = w->local + m->ring_h; break;
    case MK_GEMM_SHARED_GATE_UP: address = mk_reads_in_place(&w->dims) ? x : w->heap + m->x; break;
    default: address = w->local + m->shared_h; break;
    }
    return mk_tensor_operand(address, cols, (uint64_t)(is_shared(id) ? num_tokens : MK_RING_ROWS(&w->dims)), 0,
                             s->device->blackwell ? TILE_ROWS : TILE_ROWS / CLUSTER);
}

static bool same_tensor(const mk_tensor *a, const mk_tensor *b)
{
    bool same = a->address == b->address && a->type == b->type && a->swizzle == b->swizzle && a->rank == b->rank;
    for (uint32_t i = 0; same && i < a->rank; i++)
        same = a->dim[i] == b->dim[i] && a->box[i] == b->box[i] && (i + 1 == a->rank || a->stride_bytes[i] == b->stride_bytes[i]);
    return same;
}

static mok_status encode(mk_cuda_state *s, mk_tensor_map *map, const mk_tensor *t, const char *what)
{
    mk_cuda_kept_map *kept = &s->maps[mk_cuda_place(t->address, t->dim[1] * 256 + t->box[1], MAP_BITS) & ~(size_t)1];
    for (int i = 0; i < 2; i++)
        if (kept[i].tensor.rank && same_tensor(&kept[i].tensor, t)) {
            memcpy(map, kept[i].map, sizeof *map);
            return MOK_OK;
        }
    MK_CUDA_TRY(mk_tensor_map_encode(map, t, s->api->cuTensorMapEncodeTiled), "encoding the tensor map of %s: %llu x %llu x %llu at %p", what,
                (unsigned long long)t->dim[2], (unsigned long long)t->dim[1], (unsigned long long)t->dim[0], t->address);
    kept[1] = kept[0];
    memcpy(kept[0].map, map, sizeof *map);
    kept[0].tensor = *t;
    return MOK_OK;
}

/* e4m3 [depth, rows, cols], and its scales. */
static mok_status encode_operand(mk_cuda_state *s, const mk_cuda_mx_operand *o, uint32_t box, mk_tensor_map *map, mk_tensor_map *scales, const char *what)
{
    mk_tensor t = mk_tensor_operand_e4m3(o->data, (uint64_t)o->cols, (uint64_t)o->rows, (uint64_t)o->count, box);
    t.stride_bytes[0] = (uint64_t)o->row_bytes;
    t.stride_bytes[1] = (uint64_t)o->matrix_bytes;
    MK_TRY(encode(s, map, &t, what));
    t = mk_tensor_scales(o->scales, (uint64_t)o->cols, (uint64_t)o->rows, (uint64_t)o->count);
    t.stride_bytes[0] = (uint64_t)o->atoms_bytes;
    t.stride_bytes[1] = (uint64_t)o->scales_bytes;
    return encode(s, scales, &t, what);
}

/* Rows of the ring in MXFP8: `cols` elements each, and behind all of them their scales. A stack of `count`, or, 0, no stack. */
static mk_cuda_mx_operand ring_operand(const mok_workspace *w, int64_t place, int64_t cols, int64_t count)
{
    int64_t rows = MK_RING_ROWS(&w->dims), bytes = rows * cols;
    return (mk_cuda_mx_operand){.data = w->local + place, .scales = w->local + place + bytes, .count = count, .rows = rows, .cols = cols, .row_bytes = cols,
                                .matrix_bytes = bytes, .atoms_bytes = mk_mx_scale_bytes(MK_MX_TILE, cols), .scales_bytes = mk_mx_scale_bytes(rows, cols)};
}

/* A GEMM of the routed experts in MXFP8 on Blackwell. */
static mok_status encode_scaled_gemm(mok_workspace *w, mk_gemm_id id, const mok_weights *weights)
{
    mk_cuda_state *s = w->state;
    mk_cuda_gemm *g = &s->gemm[id];
    bool gate_up = id == MK_GEMM_GATE_UP;
    mk_cuda_mx_operand rows = gate_up ? ring_operand(w, w->memory.ring_x, w->dims.hidden, 0) : ring_operand(w, w->memory.ring_h, w->dims.intermediate, 0);
    mk_cuda_mx_operand low = mk_cuda_mx_operand_of(w, weights, gate_up ? MK_GRAD_GATE : MK_GRAD_DOWN, MK_QUANT_FORWARD);
    mk_cuda_mx_operand high = mk_cuda_mx_operand_of(w, weights, gate_up ? MK_GRAD_UP : MK_GRAD_DOWN, MK_QUANT_FORWARD);
    MK_TRY(encode_operand(s, &rows, TILE_ROWS, &g->a, &g->a_scales, "the rows in MXFP8"));
    MK_TRY(encode_operand(s, &low, COLS_WIDE / 2, &g->b_low, &g->b_low_scales, gate_up ? "gate in MXFP8" : "down in MXFP8"));
    return encode_operand(s, &high, COLS_WIDE / 2, &g->b_high, &g->b_high_scales, gate_up ? "up in MXFP8" : "down in MXFP8");
}

mok_status mk_cuda_encode_gemm(mok_workspace *w, mk_gemm_id id, const mok_forward_args *args)
{
    static const char *const names[MK_NUM_GEMMS][2] = {{"gate", "up"}, {"down", "down"}, {"shared_gate", "shared_up"}, {"shared_down", "shared_down"}};
    mk_cuda_state *s = w->state;
    mk_cuda_gemm *g = &s->gemm[id];
    if (g->scaled)
        return encode_scaled_gemm(w, id, &args->weights);
    mk_tensor a = describe_rows(w, id, args->x, args->num_tokens), low, high;
    describe_weights(w, id, &args->weights, mk_cuda_wide(w, args->wide, MK_QUANT_FORWARD), (uint32_t)(g->narrow ? COLS_NARROW : COLS_WIDE) / 2, &low, &high);
    MK_TRY(encode(s, &g->a, &a, "the rows"));
    MK_TRY(encode(s, &g->b_low, &low, names[id][0]));
    return encode(s, &g->b_high, &high, names[id][1]);
}

/* --- backward --------------------------------------------------------------------------------------------------------- */
/* Every box is 64 x 64: half a narrow tile, whichever axis is contracted. */
enum { BOX_BACKWARD = 64 };

/* A buffer over the ring's rows or, shared, over this rank's tokens; a stack of one, as the weights are stacks of many. */
static mk_tensor describe_backward_rows(const mok_workspace *w, mk_backward_map which, bool shared, const mok_backward_args *a)
{
    const mk_memory *m = &w->memory;
    const int64_t hidden = w->dims.hidden, width = shared ? w->dims.shared_intermediate : w->dims.intermediate;
    /* Without tokens too: the shared expert's weight gradients are zeros then, made by the same tasks out of any memory. */
    const int64_t rows = shared ? mk_max(a->num_tokens, 1) : MK_RING_ROWS(&w->dims);
    const bool callers = mk_reads_in_place(&w->dims) && a->num_tokens;
    const char *address;
    switch (which) {
    case MK_MAP_X: address = !shared ? w->local + m->ring_x : callers ? a->x : w->heap + m->x; break;
    case MK_MAP_DOUT: address = !shared ? w->local + m->ring_dout : callers ? a->dout : w->heap + m->dout; break;
    case MK_MAP_GATE: address = w->local + (shared ? m->shared_gate : m->ring_gate); break;
    case MK_MAP_UP: address = w->local + (shared ? m->shared_up : m->ring_up); break;
    default: address = w->local + (shared ? m->shared_h : m->ring_h); break;
    }
    return mk_tensor_operand(address, (uint64_t)(which <= MK_MAP_DOUT ? hidden : width), (uint64_t)rows, 1, BOX_BACKWARD);
}

/* MXFP8 that is multiplied as it is. */
static mok_status encode_backward_scaled(mok_workspace *w, const mok_weights *weights)
{
    mk_cuda_state *s = w->state;
    const mk_memory *m = &w->memory;
    const int64_t hidden = w->dims.hidden, width = w->dims.intermediate;
    const struct { mk_backward_map map, scales; mk_cuda_mx_operand of; const char *name; } all[] = {
        {MK_MAP_X, MK_MAP_X_SCALES, ring_operand(w, m->ring_x, hidden, 1), "x in MXFP8"},
        {MK_MAP_DOUT, MK_MAP_DOUT_SCALES, ring_operand(w, m->ring_dout, hidden, 1), "dout in MXFP8"},
        {MK_MAP_DGRAD_DGATE, MK_MAP_DGRAD_DGATE_SCALES, ring_operand(w, m->dgrad_dgate, width, 1), "dgate in MXFP8"},
        {MK_MAP_DGRAD_DUP, MK_MAP_DGRAD_DUP_SCALES, ring_operand(w, m->dgrad_dup, width, 1), "dup in MXFP8"},
        {MK_MAP_WGATE, MK_MAP_WGATE_SCALES, mk_cuda_mx_operand_of(w, weights, MK_GRAD_GATE, MK_QUANT_DGRAD), "gate transposed in MXFP8"},
        {MK_MAP_WUP, MK_MAP_WUP_SCALES, mk_cuda_mx_operand_of(w, weights, MK_GRAD_UP, MK_QUANT_DGRAD), "up transposed in MXFP8"},
        {MK_MAP_WDOWN, MK_MAP_WDOWN_SCALES, mk_cuda_mx_operand_of(w, weights, MK_GRAD_DOWN, MK_QUANT_DGRAD), "down transposed in MXFP8"},
        {MK_MAP_REPLAY_GATE, MK_MAP_REPLAY_GATE_SCALES, mk_cuda_mx_operand_of(w, weights, MK_GRAD_GATE, MK_QUANT_FORWARD), "gate of a replay in MXFP8"},
        {MK_MAP_REPLAY_UP, MK_MAP_REPLAY_UP_SCALES, mk_cuda_mx_operand_of(w, weights, MK_GRAD_UP, MK_QUANT_FORWARD), "up of a replay in MXFP8"}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i].of.data) /* a replay's may not be given, if there is none */
            MK_TRY(encode_operand(s, &all[i].of, BOX_BACKWARD, &s->backward[all[i].map], &s->backward[all[i].scales], all[i].name));
    return MOK_OK;
}

/* MXFP8: what weight gradients read, their contraction being the rows: the ring, or what they have of their own. */
static mok_status encode_wgrad(mok_workspace *w)
{
    mk_cuda_state *s = w->state;
    const mk_memory *m = &w->memory;
    const int64_t hidden = w->dims.hidden, width = w->dims.intermediate, rows = MK_RING_ROWS(&w->dims);
    const bool scaled = w->dims.mx_scaled && w->dims.mx_wgrad, own_tokens = w->dims.mx_scaled || w->dims.mx_wgrad;
    const struct { mk_backward_map map, scales; int64_t own, ring, cols; const char *name; } all[] = {
        {MK_MAP_WGRAD_X, MK_MAP_WGRAD_X_SCALES, m->wgrad_x, m->ring_x, hidden, "x of weight gradients"},
        {MK_MAP_WGRAD_DOUT, MK_MAP_WGRAD_DOUT_SCALES, m->wgrad_dout, m->ring_dout, hidden, "dout of weight gradients"},
        {MK_MAP_WGRAD_DGATE, MK_MAP_WGRAD_DGATE_SCALES, m->wgrad_dgate, m->ring_gate, width, "dgate of weight gradients"},
        {MK_MAP_WGRAD_DUP, MK_MAP_WGRAD_DUP_SCALES, m->wgrad_dup, m->ring_up, width, "dup of weight gradients"},
        {MK_MAP_WGRAD_H, MK_MAP_WGRAD_H_SCALES, m->wgrad_h, m->ring_h, width, "w h of weight gradients"}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        const bool own = scaled || (all[i].map <= MK_MAP_WGRAD_DOUT && own_tokens);
        const char *at = w->local + (own ? all[i].own : all[i].ring);
        mk_tensor t = (scaled ? mk_tensor_operand_e4m3 : mk_tensor_operand)(at, (uint64_t)all[i].cols, (uint64_t)rows, 1, BOX_BACKWARD);
        MK_TRY(encode(s, &s->backward[all[i].map], &t, all[i].name));
        if (!scaled)
            continue;
        t = mk_tensor_scales(at + rows * all[i].cols, (uint64_t)rows, (uint64_t)all[i].cols, 1);
        MK_TRY(encode(s, &s->backward[all[i].scales], &t, all[i].name));
    }
    return MOK_OK;
}

static mok_status encode_backward_mx(mok_workspace *w, const mok_backward_args *a)
{
    mk_cuda_state *s = w->state;
    const mk_memory *m = &w->memory;
    const uint64_t width = (uint64_t)w->dims.intermediate, rows = (uint64_t)MK_RING_ROWS(&w->dims);
    MK_TRY(encode_wgrad(w));
    if (w->dims.mx_scaled)
        return encode_backward_scaled(w, &a->weights);
    mk_tensor gate = mk_tensor_operand(w->local + m->dgrad_dgate, width, rows, 1, BOX_BACKWARD), up = mk_tensor_operand(w->local + m->dgrad_dup, width, rows, 1, BOX_BACKWARD);
    MK_TRY(encode(s, &s->backward[MK_MAP_DGRAD_DGATE], &gate, "dgate quantised"));
    MK_TRY(encode(s, &s->backward[MK_MAP_DGRAD_DUP], &up, "dup quantised"));
    describe_weights(w, MK_GEMM_GATE_UP, &a->weights, mk_cuda_wide(w, a->wide, MK_QUANT_FORWARD), BOX_BACKWARD, &gate, &up);
    MK_TRY(encode(s, &s->backward[MK_MAP_REPLAY_GATE], &gate, "gate of a replay"));
    return encode(s, &s->backward[MK_MAP_REPLAY_UP], &up, "up of a replay");
}

static mok_status encode_backward_half(mok_workspace *w, const mok_backward_args *a, bool shared)
{
    static const char *const names[] = {"x", "dout", "dgate", "dup", "w h", "gate", "up", "down"};
    mk_cuda_state *s = w->state;
    mk_tensor_map *maps = s->backward + (shared ? MK_MAP_SHARED : 0);
    const char *wide = mk_cuda_wide(w, a->wide_dgrad, MK_QUANT_DGRAD);
    mk_tensor gate, up, down, other;
    for (int i = MK_MAP_X; i <= MK_MAP_H; i++) {
        mk_tensor rows = describe_backward_rows(w, (mk_backward_map)i, shared, a);
        MK_TRY(encode(s, &maps[i], &rows, names[i]));
    }
    describe_weights(w, shared ? MK_GEMM_SHARED_GATE_UP : MK_GEMM_GATE_UP, &a->weights, wide, BOX_BACKWARD, &gate, &up);
    describe_weights(w, shared ? MK_GEMM_SHARED_DOWN : MK_GEMM_DOWN, &a->weights, wide, BOX_BACKWARD, &down, &other);
    MK_TRY(encode(s, &maps[MK_MAP_WGATE], &gate, names[MK_MAP_WGATE]));
    MK_TRY(encode(s, &maps[MK_MAP_WUP], &up, names[MK_MAP_WUP]));
    return encode(s, &maps[MK_MAP_WDOWN], &down, names[MK_MAP_WDOWN]);
}

mok_status mk_cuda_encode_backward(mok_workspace *w, const mok_backward_args *a)
{
    if (w->dims.capacity_tiles)
        MK_TRY(encode_backward_half(w, a, false));
    if (w->dims.capacity_tiles && w->dims.mx)
        MK_TRY(encode_backward_mx(w, a));
    return w->dims.shared_intermediate ? encode_backward_half(w, a, true) : MOK_OK;
}
