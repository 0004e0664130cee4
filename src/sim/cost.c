/* What tasks cost: cuts of the walk, products, and the bytes that come from memory because L2 has lost them. */
#include "sim/state.h"

double sim_rate(const sim_case *c)
{
    const sim_profile *p = &c->profile;
    const double bf16 = (c->sustained ? p->bf16_sustained_tflops : p->bf16_tflops) * (c->pass == MK_PASS_FORWARD ? p->forward_factor : 1);
    return c->mxfp8 ? (c->sustained ? p->mxfp8_sustained_tflops : p->mxfp8_tflops) : bf16;
}

/* MX blocks of 32 elements share a scale byte. */
double sim_row_bytes(const sim_case *c) { return (double)c->dims.hidden * (c->mxfp8 ? 33.0 / 32 : 2); }

static int32_t parts(int64_t cols, const sim_profile *p) { return (int32_t)mk_ceil_div(cols, (int64_t)(p->tile_cols * p->cluster)); }

mk_grid sim_grid(const sim_profile *p, const mk_dims *d, mk_pass pass)
{
    int64_t shared = d->shared_intermediate;
    mk_grid g = {.group_tiles = MK_GROUP_TILES, .gate_up = parts(2 * d->intermediate, p),
                 .shared_gate_up = shared ? parts(2 * shared, p) : 0};
    if (pass == MK_PASS_FORWARD) {
        g.down = parts(d->hidden, p);
        g.shared_down = shared ? g.down : 0;
        return g;
    }
    g.dgrad_down = parts(d->intermediate, p);
    g.dgrad_gate_up = parts(d->hidden, p);
    g.wgrad = (int32_t)(2 * mk_ceil_div(d->intermediate, MK_ROW_TILE) * parts(d->hidden, p) + mk_ceil_div(d->hidden, MK_ROW_TILE) * parts(d->intermediate, p));
    if (shared) {
        g.shared_dgrad_down = parts(shared, p);
        g.shared_dgrad_gate_up = parts(d->hidden, p);
        g.shared_wgrad = (int32_t)(2 * mk_ceil_div(shared, MK_ROW_TILE) * parts(d->hidden, p) + mk_ceil_div(d->hidden, MK_ROW_TILE) * parts(shared, p));
    }
    g.shared_gate_up = d->saved_tiles ? 0 : g.shared_gate_up; /* the context holds them */
    return g;
}

/* Bytes of an operand that have to come from memory: none if it was used while no more than the L2 has come in since. */
static double fetch(sim_rank *r, double *seen, double bytes, double l2_bytes)
{
    if (r->touched - *seen < l2_bytes) {
        *seen = r->touched;
        return 0;
    }
    r->touched += bytes;
    *seen = r->touched;
    return bytes;
}

/* A product of rows with a weight: rows [128, K] of `tile` and columns `part` of expert's [N, K]. which: of the pass's two weights. */
static sim_cost product(sim_state *s, sim_rank *r, mk_task task, int which, int64_t k, int32_t grid, bool shared)
{
    const sim_profile *p = &s->c->profile;
    double cols = p->tile_cols * p->cluster, element = s->c->mxfp8 && !shared ? 33.0 / 32 : 2, l2 = p->l2_mib * 1048576;
    sim_cost cost = {.flops = 2.0 * MK_ROW_TILE * cols * (double)k, .epilogue = p->epilogue_us * p->tile_cols / 128 * 1e-6};
    if (shared) { /* few rows, read again by its tasks alone: its weights stay */
        cost.hbm_bytes = task.tile == 0 ? cols * (double)k * element : 0;
        return cost;
    }
    int64_t expert = mk_expert_of_tile(&r->table, task.tile);
    cost.hbm_bytes = fetch(r, &r->weight_seen[which][expert * grid + task.part], cols * (double)k * element, l2);
    cost.hbm_bytes += fetch(r, &r->tile_seen[which][task.tile], MK_ROW_TILE * (double)k * element, l2);
    return cost;
}

/* Rows of the piece contracted into one tile of a weight gradient. */
static sim_cost weight_gradient(const sim_state *s, double rows, int32_t tasks, bool cut, double width)
{
    const sim_profile *p = &s->c->profile;
    double cols = p->tile_cols * p->cluster, h = (double)s->c->dims.hidden, out = MK_ROW_TILE * cols * (cut ? 8 : 2);
    sim_cost cost = {.flops = 2.0 * MK_ROW_TILE * cols * rows / p->wgrad_factor, .epilogue = (p->wgrad_epilogue_us + cut * p->wgrad_cut_us) * p->tile_cols / 128 * 1e-6};
    cost.hbm_bytes = out + rows * 2 * (2 * h + 3 * width) / tasks; /* x, dout, dgate, dup and w h, once */
    return cost;
}

sim_cost sim_task_cost(sim_state *s, sim_rank *r, mk_task task)
{
    const mk_dims *d = &r->t->dims;
    const mk_grid *g = &s->grid;
    double swiglu_bwd = s->c->profile.swiglu_bwd_us * s->c->profile.tile_cols / 128 * 1e-6;
    sim_cost cost;
    switch (task.kind) {
    case MK_TASK_GATE_UP: return product(s, r, task, 0, d->hidden, g->gate_up, false);
    case MK_TASK_DOWN: return product(s, r, task, 1, d->intermediate, g->down, false);
    case MK_TASK_SHARED_GATE_UP: return product(s, r, task, 0, d->hidden, g->shared_gate_up, true);
    case MK_TASK_SHARED_DOWN: return product(s, r, task, 1, d->shared_intermediate, g->shared_down, true);
    case MK_TASK_DGRAD_GATE_UP: return product(s, r, task, 0, 2 * d->intermediate, g->dgrad_gate_up, false);
    case MK_TASK_SHARED_DGRAD_GATE_UP: return product(s, r, task, 0, 2 * d->shared_intermediate, g->shared_dgrad_gate_up, true);
    case MK_TASK_DGRAD_DOWN:
    case MK_TASK_SHARED_DGRAD_DOWN:
        cost = task.kind == MK_TASK_DGRAD_DOWN ? product(s, r, task, 1, d->hidden, g->dgrad_down, false)
                                               : product(s, r, task, 1, d->hidden, g->shared_dgrad_down, true);
        cost.extra = swiglu_bwd;
        cost.hbm_bytes += 5.0 * MK_ROW_TILE * s->c->profile.tile_cols * s->c->profile.cluster * 2; /* gate, up in; dgate, dup, w h out */
        return cost;
    case MK_TASK_WGRAD: {
        const mk_piece *piece = &r->table.pieces[task.tile];
        return weight_gradient(s, (double)mk_round_up(piece->rows, 64), g->wgrad, !piece->is_first || !piece->is_last, (double)d->intermediate);
    }
    default: return weight_gradient(s, (double)mk_round_up(s->c->tokens, 64), g->shared_wgrad, false, (double)d->shared_intermediate);
    }
}
