/* A cluster of SMs: tickets in order, a task's products, its end. */
#include "sim/state.h"

static sim_cluster *cluster_of(sim_state *s, int32_t actor)
{
    return &s->cluster[(int64_t)(actor / (s->clusters + s->movers)) * s->clusters + actor % (s->clusters + s->movers)];
}

static mk_task task_at(const sim_rank *r, int64_t number)
{
    if (r->order)
        return number < r->walk.num_tasks ? r->order[number] : mk_task_make(MK_TASK_NONE, 0, 0);
    return mk_walk_task(&r->walk, number);
}

static void draw(const sim_state *s, sim_cluster *u)
{
    sim_rank *r = &s->ranks[u->rank];
    while (u->queued <= s->c->profile.tasks_ahead && r->ticket < r->walk.num_tasks)
        u->queue[u->queued++] = r->ticket++;
}

/* Results of a down task (or of the last product of the backward) go to their tokens' ranks in pieces of a row. */
static double push_rows(sim_state *s, sim_cluster *u, double now)
{
    sim_rank *r = &s->ranks[u->rank];
    const sim_profile *p = &s->c->profile;
    double cols = mk_min((int64_t)(p->tile_cols * p->cluster), r->t->dims.hidden), bytes = cols * 2, drained = now, remote = 0, local = 0;
    const mk_row *rows = &r->table.rows[(int64_t)u->task.tile * MK_ROW_TILE];
    int64_t valid = mk_valid_rows(&r->table, u->task.tile);
    for (int64_t i = 0; i < valid; i++) {
        int32_t to = rows[i].src_rank;
        if (s->c->free_link || sim_strategies[s->c->strategy].pull_combine || to == u->rank) {
            local += bytes;
            continue;
        }
        double left, landed = sim_transfer(s, u->rank, to, bytes, p->link_push_gbps, p->tile_cols * 2, now, &left);
        r->landed = landed > r->landed ? landed : r->landed;
        drained = left > drained ? left : drained;
        remote += bytes;
    }
    sim_memory(r, p, local, now);
    r->debt += (local + remote) * 1e-12 * p->push_us_per_mb * s->clusters;
    return drained;
}

/* The products are done: bring them out, tell who waits for them. */
static void finish(sim_state *s, sim_cluster *u, double now)
{
    sim_rank *r = &s->ranks[u->rank];
    mk_task_kind kind = u->task.kind;
    bool pushes = kind == MK_TASK_DOWN || kind == MK_TASK_DGRAD_GATE_UP;
    double out = now + u->epilogue, drained = pushes ? push_rows(s, u, now) : now;
    int counter = mk_task_counter(kind);
    u->slot_free[u->slot] = out > drained ? out : drained;
    u->slot = s->c->profile.overlap_tiles >= 2 ? u->slot ^ 1 : 0;
    if (counter >= 0) /* a task that pushes has read its rows by now, and nobody here reads its results */
        sim_raise(s, u->rank, mk_counter_index(&r->t->dims, counter, u->task.tile), 1, pushes ? now : out);
    if (r->num_macros) {
        int64_t tile = kind == MK_TASK_WGRAD ? mk_max(r->table.pieces[u->task.tile].tile_end - 1, 0) : u->task.tile;
        if (kind >= MK_TASK_DISPATCH)
            sim_raise(s, u->rank, r->macro_base + sim_macro_of(s, r, tile), 1, u->slot_free[u->slot ^ (s->c->profile.overlap_tiles >= 2)]);
    }
    sim_trace(s, u->rank, u->lane, sim_task_name(kind), u->started, now);
    sim_stage(s, (int32_t)kind, u->started, now, 1.0 / ((double)s->clusters * s->num_ranks));
    u->last_end = now;
    u->running = false;
}

static void note_idle(sim_state *s, const sim_cluster *u, double start)
{
    double idle = start - u->last_end, slot = u->slot_free[u->slot] - u->last_end;
    if (idle <= 0)
        return;
    if (!u->stalled && slot > 0)
        s->sum[SIM_SHARE_EPILOGUE] += idle;
    else
        s->sum[u->waited_rows ? SIM_SHARE_ROWS : SIM_SHARE_TASKS] += idle;
}

static void start(sim_state *s, sim_cluster *u, int32_t actor, double now)
{
    sim_rank *r = &s->ranks[u->rank];
    const sim_profile *p = &s->c->profile;
    sim_cost cost = sim_task_cost(s, r, u->task);
    double begin = now + (u->stalled ? p->stall_us * 1e-6 : 0);
    begin = begin > u->slot_free[u->slot] ? begin : u->slot_free[u->slot];
    double compute = cost.flops / s->task_rate + p->task_us * 1e-6 + cost.extra, end = begin + compute;
    double memory = sim_memory(r, p, cost.hbm_bytes, begin), lost = r->debt < 0.5 * compute ? r->debt : 0.5 * compute;
    r->debt -= lost;
    note_idle(s, u, begin);
    s->sum[SIM_SHARE_COMPUTE] += compute;
    s->sum[SIM_SHARE_COPIES] += lost;
    end += lost;
    if (memory > end) {
        s->sum[SIM_SHARE_MEMORY] += memory - end;
        end = memory;
    }
    u->started = begin;
    u->epilogue = cost.epilogue;
    u->end = end;
    u->running = true;
    u->stalled = u->waited_rows = false;
    s->out->tasks++;
    sim_events_push(&s->events, end, actor);
}

void sim_cluster_step(sim_state *s, int32_t actor, double now)
{
    sim_cluster *u = cluster_of(s, actor);
    sim_rank *r = &s->ranks[u->rank];
    double ready = now;
    mk_need need;
    if (u->running) {
        finish(s, u, now);
        for (int32_t i = 1; i < u->queued; i++)
            u->queue[i - 1] = u->queue[i];
        u->queued--;
    }
    draw(s, u);
    if (u->queued == 0) {
        u->ended = true;
        for (int i = 0; i < 2; i++)
            u->last_end = u->slot_free[i] > u->last_end ? u->slot_free[i] : u->last_end;
        s->left--;
        return;
    }
    u->task = task_at(r, u->queue[0]);
    for (int i = 0; mk_task_need(&r->walk, &r->table, &r->t->dims, u->task, i, &need); i++)
        for (int32_t at = need.first; at < need.end; at++)
            if (!sim_need(s, u->rank, mk_counter_index(&r->t->dims, need.counter, at), need.count, actor, now, &ready)) {
                u->stalled = true;
                u->waited_rows |= need.counter == MK_COUNTER_s1_rows_arrived;
                return;
            } else if (ready > now) {
                u->waited_rows |= need.counter == MK_COUNTER_s1_rows_arrived;
            }
    if (ready > now) {
        u->stalled = true;
        sim_events_push(&s->events, ready, actor);
        return;
    }
    start(s, u, actor, now);
}
