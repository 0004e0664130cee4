/* A mover: batches of 32 rows into the ring, from their ranks or from a row of the same token that is there already; or, where rows are
 * pushed, from this rank into the rings of others. */
#include "sim/state.h"

static sim_mover *mover_of(sim_state *s, int32_t actor)
{
    return &s->mover[(int64_t)(actor / (s->clusters + s->movers)) * s->movers + actor % (s->clusters + s->movers) - s->clusters];
}

/* --- what a batch holds ------------------------------------------------------------------------------------------------ */

static int32_t copied_from(const sim_state *s, const mk_row *row) { return s->c->pass == MK_PASS_BACKWARD ? row->copy_bwd : row->copy_fwd; }

/* Rows of a batch of the table. A row that copies another of its own tile is written together with it, as the kernel does. */
static void look_at(sim_state *s, sim_mover *m)
{
    const sim_rank *r = &s->ranks[m->rank];
    int64_t last = r->walk.num_tiles * MK_ROW_TILE - 1, first = m->batch * SIM_BATCH;
    m->num_moves = 0;
    for (int64_t i = first; i < first + SIM_BATCH; i++) {
        int64_t at = s->c->pass == MK_PASS_BACKWARD ? i : last - i;
        const mk_row *row = &r->table.rows[at];
        m->tile = at / MK_ROW_TILE;
        if (row->src_rank < 0)
            continue;
        int32_t from = copied_from(s, row);
        if (from >= 0 && from / MK_ROW_TILE == m->tile && m->num_moves) {
            m->moves[m->num_moves - 1].duplicates++;
            s->out->rows_copied++;
            continue;
        }
        m->moves[m->num_moves++] = (sim_row_move){(int32_t)at, m->rank, 0};
    }
}

/* How many tiles come before a row's in its rank's walk. */
static int64_t turn_of(const sim_state *s, const sim_row_move *move)
{
    int64_t tile = move->row / MK_ROW_TILE;
    return s->c->pass == MK_PASS_BACKWARD ? tile : s->ranks[move->rank].walk.num_tiles - 1 - tile;
}

/* Of one turn only: a batch moves when all of its slots are free, and a later turn's slot may become free through this turn's rows. */
static void draw_sends(sim_state *s, sim_mover *m)
{
    sim_rank *r = &s->ranks[m->rank];
    int64_t first = r->batch_ticket, end = mk_min(first + SIM_BATCH, r->num_sends);
    for (m->num_moves = 0; first + m->num_moves < end && turn_of(s, &r->sends[first + m->num_moves]) == turn_of(s, &r->sends[first]); m->num_moves++)
        m->moves[m->num_moves] = r->sends[first + m->num_moves];
    r->batch_ticket += m->num_moves;
}

/* --- waiting ----------------------------------------------------------------------------------------------------------- */

/* The slot of a tile is free; where macrobatches run one after the other, all of the one before is done too. */
static bool slot_is_free(sim_state *s, int32_t rank, int64_t tile, int32_t actor, double now, double *ready)
{
    sim_rank *r = &s->ranks[rank];
    int64_t old = mk_tile_before(&r->walk, r->t->dims.ring_tiles, tile), macro = r->num_macros ? sim_macro_of(s, r, tile) : 0;
    mk_need need;
    for (int i = 0; old >= 0 && mk_dispatch_need(&r->walk, &r->table, old, i, &need); i++)
        if (!sim_need(s, rank, mk_counter_index(&r->t->dims, need.counter, need.first), need.count, actor, now, ready))
            return false;
    double done = 0;
    if (macro == 0)
        return true;
    if (!sim_need(s, rank, r->macro_base + macro - 1, (uint32_t)r->macro_tasks[macro - 1], actor, now, &done))
        return false;
    done += s->c->profile.macrobatch_us * 1e-6;
    *ready = done > *ready ? done : *ready;
    return true;
}

/* A row of another rank that is copied waits for the tile it is copied from. */
static bool sources_are_there(sim_state *s, const sim_mover *m, int32_t actor, double now, double *ready)
{
    const sim_rank *r = &s->ranks[m->rank];
    for (int32_t i = 0; i < m->num_moves; i++) {
        const mk_row *row = &r->table.rows[m->moves[i].row];
        int32_t from = copied_from(s, row);
        int64_t tile = from / MK_ROW_TILE;
        if (from >= 0 && tile != m->tile && row->src_rank != m->rank &&
            !sim_need(s, m->rank, mk_counter_index(&r->t->dims, MK_COUNTER_s1_rows_arrived, tile), (uint32_t)mk_valid_rows(&r->table, tile), actor, now, ready))
            return false;
    }
    return true;
}

static bool may_go(sim_state *s, const sim_mover *m, int32_t actor, double now, double *ready)
{
    if (!sim_strategies[s->c->strategy].push_dispatch)
        return slot_is_free(s, m->rank, m->tile, actor, now, ready) && sources_are_there(s, m, actor, now, ready);
    for (int32_t i = 0; i < m->num_moves; i++) { /* a credit of the peer's has to come over the link first */
        double there = now;
        if (!slot_is_free(s, m->moves[i].rank, m->moves[i].row / MK_ROW_TILE, actor, now, &there))
            return false;
        there += there > now && m->moves[i].rank != m->rank ? s->c->profile.link_us * 1e-6 : 0;
        *ready = there > *ready ? there : *ready;
    }
    return true;
}

/* --- moving ------------------------------------------------------------------------------------------------------------ */

/* One row; returns when it is in its ring. */
static double move_row(sim_state *s, const sim_mover *m, const sim_row_move *move, double now)
{
    const sim_profile *p = &s->c->profile;
    sim_rank *to = &s->ranks[move->rank];
    const mk_row *row = &to->table.rows[move->row];
    bool copied = copied_from(s, row) >= 0, remote = row->src_rank != move->rank && !copied;
    double bytes = s->row_bytes, done, left;
    s->out->rows_copied += copied;
    s->out->rows_pulled += !copied;
    s->out->rows_pulled_peer += remote;
    to->debt += bytes * (1 + move->duplicates) * 1e-12 * p->copy_us_per_mb * s->clusters;
    double in_memory = sim_memory(to, p, bytes * (1 + move->duplicates + !remote), now);
    if (remote && !s->c->free_link) {
        bool push = move->rank != m->rank;
        sim_memory(&s->ranks[row->src_rank], p, bytes, now);
        done = sim_transfer(s, row->src_rank, move->rank, bytes, push ? p->link_push_gbps : p->link_pull_gbps, bytes, now, &left);
        return done + (push ? p->mover_us : p->mover_remote_us - p->link_us) * 1e-6;
    }
    done = now + p->mover_us * 1e-6;
    return in_memory > done ? in_memory : done;
}

static void announce(sim_state *s, sim_mover *m, const sim_row_move *move, double time)
{
    sim_rank *to = &s->ranks[move->rank];
    const mk_row *row = &to->table.rows[move->row];
    int64_t tile = move->row / MK_ROW_TILE;
    int32_t from = copied_from(s, row);
    const mk_dims *d = &to->t->dims;
    time += move->rank != m->rank ? s->c->profile.link_us * 1e-6 : 0;
    sim_raise(s, move->rank, mk_counter_index(d, MK_COUNTER_s1_rows_arrived, tile), (uint32_t)(1 + move->duplicates), time);
    if (move->duplicates)
        sim_raise(s, move->rank, mk_counter_index(d, MK_COUNTER_s1_copies_done, tile), (uint32_t)move->duplicates, time);
    if (from >= 0)
        sim_raise(s, move->rank, mk_counter_index(d, MK_COUNTER_s1_copies_done, from / MK_ROW_TILE), 1, time);
}

/* Half of the slots fill while the other half empties. */
static void move_group(sim_state *s, sim_mover *m, int32_t actor, double now)
{
    const sim_profile *p = &s->c->profile;
    bool push = sim_strategies[s->c->strategy].push_dispatch;
    double gbps = s->c->comm_sms ? p->comm_sm_gbps / SIM_MOVERS_PER_COMM_SM : p->mover_gbps, done = now;
    int32_t first = m->at, end = (int32_t)mk_min(m->num_moves, first + (int64_t)s->group_rows), signals = 0;
    double store = (end - first) * s->row_bytes / (gbps * 1e9);
    for (int32_t i = first; i < end; i++) {
        sim_rank *to = &s->ranks[m->moves[i].rank];
        double *tile_start = &to->tile_start[m->moves[i].row / MK_ROW_TILE], landed = move_row(s, m, &m->moves[i], now);
        *tile_start = *tile_start < 0 ? now : *tile_start;
        done = landed > done ? landed : done;
        signals += m->moves[i].rank != m->rank;
    }
    double signal = push && !s->c->no_signals ? signals * p->signal_us * 1e-6 : 0;
    s->out->signal_seconds += signal;
    m->at = end;
    double other = s->slot_rows < 2 ? done : m->previous, next = (other > now ? other : now) + store + signal;
    m->previous = done;
    m->finish = done + store + signal;
    if (m->at >= m->num_moves) {
        m->step = 3;
        next = m->finish;
    }
    sim_events_push(&s->events, next, actor);
}

void sim_mover_step(sim_state *s, int32_t actor, double now)
{
    sim_mover *m = mover_of(s, actor);
    sim_rank *r = &s->ranks[m->rank];
    bool push = sim_strategies[s->c->strategy].push_dispatch;
    double ready = now, per_batch = s->c->profile.mover_batch_us * 1e-6;
    if (m->step == 3) {
        for (int32_t i = 0; i < m->num_moves; i++)
            announce(s, m, &m->moves[i], now);
        sim_trace(s, m->rank, m->lane, "dispatch", m->started, now);
        sim_stage(s, MK_TASK_DISPATCH, m->started, now, 1.0 / ((double)s->movers * s->num_ranks));
        m->step = 0;
    }
    if (m->step == 0) {
        if (r->batch_ticket >= r->num_batches) {
            s->left--;
            return;
        }
        if (push) {
            draw_sends(s, m);
        } else {
            m->batch = r->batch_ticket++;
            look_at(s, m);
        }
        m->step = 1;
    }
    if (m->step == 1) {
        if (!may_go(s, m, actor, now, &ready))
            return;
        m->step = 2;
        m->at = 0;
        m->previous = m->started = ready;
        sim_events_push(&s->events, ready + per_batch, actor);
        return;
    }
    if (m->num_moves == 0) { /* padding only */
        m->step = 0;
        sim_events_push(&s->events, now, actor);
        return;
    }
    move_group(s, m, actor, now);
}
