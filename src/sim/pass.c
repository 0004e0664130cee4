/* The event loop, its servers and counters, and what comes before and after the fused kernel. */
#include <stdio.h>
#include <string.h>

#include "sim/state.h"

const sim_strategy sim_strategies[SIM_NUM_STRATEGIES] = {
#define STRATEGY(name, pd, pc, s, ph, text) {#name, pd, pc, s, ph, text},
    SIM_STRATEGY_LIST(STRATEGY)
#undef STRATEGY
};

const char *sim_task_name(int32_t kind)
{
    static const char *const names[] = {
#define NAME(upper, lower) #lower,
        MK_TASK_LIST(NAME)
#undef NAME
    };
    return names[kind];
}

/* --- over time ---------------------------------------------------------------------------------------------------------- */

void sim_series_start(sim_series *s, double width)
{
    memset(s, 0, sizeof *s);
    s->width = width;
}

static void widen(sim_series *s)
{
    for (int i = 0; i < SIM_BINS / 2; i++)
        s->sum[i] = s->sum[2 * i] + s->sum[2 * i + 1];
    memset(&s->sum[SIM_BINS / 2], 0, sizeof s->sum / 2);
    s->width *= 2;
}

void sim_series_add(sim_series *s, double from, double to, double amount)
{
    while (to >= s->width * SIM_BINS)
        widen(s);
    int first = (int)(from / s->width), last = (int)(to / s->width);
    if (first == last) {
        s->sum[first] += amount;
        return;
    }
    double rate = amount / (to - from);
    for (int i = first; i <= last; i++) {
        double low = i == first ? from : i * s->width, high = i == last ? to : (i + 1) * s->width;
        s->sum[i] += rate * (high - low);
    }
}

/* --- servers ------------------------------------------------------------------------------------------------------------ */

static double serve(double *free_at, double now, double seconds)
{
    double begin = *free_at > now ? *free_at : now;
    *free_at = begin + seconds;
    return *free_at;
}

double sim_transfer(sim_state *s, int32_t from, int32_t to, double bytes, double gbps, double chunk, double now, double *drained)
{
    const sim_profile *p = &s->c->profile;
    double rate = gbps * 1e9 * chunk / (chunk + p->link_half_chunk) * (s->num_ranks > 2 ? p->switch_factor : 1);
    sim_rank *out = &s->ranks[from], *in = &s->ranks[to];
    double sent = serve(&out->out_free, now, bytes / rate), received = serve(&in->in_free, now, bytes / rate);
    out->link_out_bytes += bytes;
    in->link_in_bytes += bytes;
    sim_series_add(&s->out->link_out, sent - bytes / rate, sent, bytes);
    sim_series_add(&s->out->link_in, received - bytes / rate, received, bytes);
    *drained = sent;
    return (sent > received ? sent : received) + p->link_us * 1e-6;
}

double sim_memory(sim_rank *r, const sim_profile *p, double bytes, double now)
{
    return bytes > 0 ? serve(&r->hbm_free, now, bytes / (p->hbm_gbps * 1e9)) : now;
}

/* --- counters ----------------------------------------------------------------------------------------------------------- */

sim_waiter *sim_waiter_of(sim_state *s, int32_t actor)
{
    int32_t per = s->clusters + s->movers, rank = actor / per, i = actor % per;
    return i < s->clusters ? &s->cluster[(int64_t)rank * s->clusters + i].wait : &s->mover[(int64_t)rank * s->movers + i - s->clusters].wait;
}

void sim_raise(sim_state *s, int32_t rank, int64_t counter, uint32_t n, double time)
{
    sim_counter *c = &s->ranks[rank].counters[counter];
    c->count += n;
    c->time = time > c->time ? time : c->time;
    while (c->waiter != SIM_NOBODY) { /* all of them wait for the same count */
        int32_t actor = c->waiter;
        sim_waiter *w = sim_waiter_of(s, actor);
        if (w->count > c->count)
            return;
        c->waiter = w->next;
        sim_events_push(&s->events, c->time, actor);
    }
}

bool sim_need(sim_state *s, int32_t rank, int64_t counter, uint32_t count, int32_t actor, double now, double *ready)
{
    sim_counter *c = &s->ranks[rank].counters[counter];
    if (c->count >= count) {
        *ready = c->time > *ready ? c->time : *ready;
        return true;
    }
    sim_waiter *w = sim_waiter_of(s, actor);
    *w = (sim_waiter){c->waiter, count, now};
    c->waiter = actor;
    return false;
}

/* Macrobatches are numbered in the order of the walk. */
int64_t sim_macro_of(const sim_state *s, const sim_rank *r, int64_t tile)
{
    int64_t ring = r->t->dims.ring_tiles;
    return s->c->pass == MK_PASS_BACKWARD ? tile / ring : (r->walk.num_tiles - 1 - tile) / ring;
}

/* --- notes -------------------------------------------------------------------------------------------------------------- */

void sim_trace(const sim_state *s, int32_t rank, int32_t lane, const char *name, double start, double end)
{
    if (s->c->trace && rank == s->c->trace_rank)
        s->c->trace(s->c->user, rank, lane, name, start, end);
}

void sim_stage(sim_state *s, int32_t kind, double start, double end, double per)
{
    sim_result *o = s->out;
    o->stage_busy[kind] += (end - start) * per;
    o->stage_first[kind] = start < o->stage_first[kind] ? start : o->stage_first[kind];
    o->stage_last[kind] = end > o->stage_last[kind] ? end : o->stage_last[kind];
}

/* --- setting up --------------------------------------------------------------------------------------------------------- */

static void set_walk(const sim_state *s, sim_rank *r)
{
    const mk_dims *d = &r->t->dims;
    bool backward = s->c->pass == MK_PASS_BACKWARD;
    r->walk = (mk_walk){.pass = s->c->pass, .grid = s->grid, .num_tiles = r->t->head.num_tiles, .mb_tiles = backward ? d->mb_tiles_bwd : d->mb_tiles_fwd,
                        .shared_tiles = d->shared_intermediate ? mk_ceil_div(s->c->tokens, MK_ROW_TILE) : 0, .tiles = r->table.tiles, .piece_first = r->table.piece_first,
                        .num_pieces = r->t->head.num_pieces, .replay_from = backward ? mk_min(d->saved_tiles, r->t->head.num_tiles) : 0};
    if (!sim_strategies[s->c->strategy].serial) {
        mk_walk_count(&r->walk);
        return;
    }
    r->walk.grid.wgrad = 0; /* pieces hang on macrobatches there, not on minibatches: counted by themselves */
    mk_walk_count(&r->walk);
    r->walk.grid.wgrad = s->grid.wgrad;
    r->walk.num_tasks += r->walk.num_pieces * s->grid.wgrad;
}

/* One macrobatch after the other: the walk of each, its weight gradients at its end. */
static bool order_by_macrobatch(const sim_state *s, sim_rank *r)
{
    int64_t ring = r->t->dims.ring_tiles, tiles = r->walk.num_tiles, n = 0;
    r->num_macros = mk_ceil_div(tiles, ring);
    r->order = malloc(sizeof *r->order * (size_t)(r->walk.num_tasks + 1));
    r->macro_tasks = calloc((size_t)r->num_macros + 1, sizeof *r->macro_tasks);
    if (!r->order || !r->macro_tasks)
        return false;
    for (; n < r->walk.shared_tasks; n++)
        r->order[n] = mk_walk_task(&r->walk, n);
    mk_tile *own = malloc(sizeof *own * (size_t)mk_min(ring, tiles + 1)); /* the macrobatch's, counted from its first */
    for (int64_t m = 0; m < r->num_macros && own; m++) {
        bool backward = s->c->pass == MK_PASS_BACKWARD;
        int64_t first = backward ? m * ring : mk_max(tiles - (m + 1) * ring, 0), end = backward ? mk_min(first + ring, tiles) : tiles - m * ring, before = n;
        mk_walk part = r->walk;
        part.num_tiles = end - first;
        part.tiles = own;
        for (int64_t t = first; t < end; t++) {
            const mk_tile *of = &r->table.tiles[t];
            own[t - first] = (mk_tile){of->expert, of->rows, (int32_t)(of->segment_first - first), (int32_t)(of->segment_end - first)};
        }
        part.shared_tiles = part.grid.wgrad = part.grid.shared_wgrad = 0;
        part.replay_from = mk_min(mk_max(r->walk.replay_from - first, 0), part.num_tiles);
        mk_walk_count(&part);
        for (int64_t i = 0; i < part.num_tasks; i++) {
            r->order[n] = mk_walk_task(&part, i);
            r->order[n++].tile += (int32_t)first;
        }
        int32_t last_piece = m == r->num_macros - 1 ? r->t->head.num_pieces : r->table.piece_first[m + 1];
        for (int32_t piece = r->table.piece_first[m]; piece < last_piece && s->grid.wgrad; piece++)
            for (int32_t i = 0; i < s->grid.wgrad; i++)
                r->order[n++] = mk_task_make(MK_TASK_WGRAD, piece, i);
        r->macro_tasks[m] = (int32_t)(n - before);
    }
    free(own);
    return n == r->walk.num_tasks;
}

static double *make_seen(int64_t count, bool *ok)
{
    double *seen = malloc(sizeof *seen * (size_t)(count + 1));
    *ok &= seen != NULL;
    for (int64_t i = 0; i < count && seen; i++)
        seen[i] = -1e300;
    return seen;
}

static bool set_up_rank(sim_state *s, int32_t index, const sim_rank_table *t)
{
    sim_rank *r = &s->ranks[index];
    const mk_dims *d = &t->dims;
    const mk_grid *g = &s->grid;
    bool ok = true;
    r->t = t;
    r->table = t->table;
    set_walk(s, r);
    r->num_batches = r->walk.num_tiles * (MK_ROW_TILE / SIM_BATCH);
    if (sim_strategies[s->c->strategy].serial && !order_by_macrobatch(s, r))
        return false;
    int64_t pieces = t->head.num_pieces, counters;
    mk_dims numbered = *d; /* mk_counter_index puts pieces after tiles, shared tiles after as many pieces as the dims allow */
    counters = mk_counter_index(&numbered, MK_NUM_COUNTERS - 1, MK_SHARED_TILES(d)) + pieces + 1;
    r->macro_base = counters;
    counters += r->num_macros + 1;
    r->counters = malloc(sizeof *r->counters * (size_t)counters);
    for (int64_t i = 0; i < counters && r->counters; i++)
        r->counters[i] = (sim_counter){0, SIM_NOBODY, 0};
    r->weight_seen[0] = make_seen(d->experts_count * mk_max(g->gate_up, g->dgrad_gate_up), &ok);
    r->weight_seen[1] = make_seen(d->experts_count * mk_max(g->down, g->dgrad_down), &ok);
    r->tile_seen[0] = make_seen(r->walk.num_tiles, &ok);
    r->tile_seen[1] = make_seen(r->walk.num_tiles, &ok);
    r->tile_start = make_seen(r->walk.num_tiles, &ok);
    return ok && r->counters;
}

/* Rows that each rank pushes: by tile in the order of their walks, and inside a tile's turn beginning with the next rank, so that not all
 * write to the same one. */
static bool list_sends(sim_state *s, const sim_tables *tables)
{
    int64_t *count = calloc((size_t)s->num_ranks, sizeof *count), most = 0;
    bool ok = count != NULL, backward = s->c->pass == MK_PASS_BACKWARD;
    for (int32_t d = 0; d < s->num_ranks && ok; d++) {
        most = mk_max(most, tables->ranks[d].head.num_tiles);
        for (int64_t i = 0; i < (int64_t)tables->ranks[d].head.num_tiles * MK_ROW_TILE; i++)
            if (tables->ranks[d].table.rows[i].src_rank >= 0)
                count[tables->ranks[d].table.rows[i].src_rank]++;
    }
    for (int32_t r = 0; r < s->num_ranks && ok; r++)
        ok = (s->ranks[r].sends = malloc(sizeof(sim_row_move) * (size_t)(count[r] + 1))) != NULL;
    for (int64_t q = 0; q < most && ok; q++)
        for (int32_t turn = 0; turn < s->num_ranks; turn++)
            for (int32_t d = 0; d < s->num_ranks; d++) {
                const sim_rank_table *t = &tables->ranks[d];
                int32_t src = (d - turn - 1 + 2 * s->num_ranks) % s->num_ranks; /* this turn's sender to d */
                int64_t tile = backward ? q : t->head.num_tiles - 1 - q;
                if (tile < 0 || tile >= t->head.num_tiles)
                    continue;
                for (int64_t i = tile * MK_ROW_TILE; i < (tile + 1) * MK_ROW_TILE; i++)
                    if (t->table.rows[i].src_rank == src)
                        s->ranks[src].sends[s->ranks[src].num_sends++] = (sim_row_move){(int32_t)i, d, 0};
            }
    for (int32_t r = 0; r < s->num_ranks && ok; r++)
        s->ranks[r].num_batches = s->ranks[r].num_sends; /* a batch takes as many as it holds */
    free(count);
    return ok;
}

static bool set_up(sim_state *s, const sim_case *c, const sim_tables *tables, sim_result *out)
{
    const sim_profile *p = &c->profile;
    double width = p->cluster;
    s->c = c;
    s->out = out;
    s->num_ranks = tables->num_ranks;
    s->grid = sim_grid(p, &c->dims, c->pass);
    s->clusters = (int32_t)((p->sms - c->comm_sms) / width);
    s->movers = c->comm_sms ? c->comm_sms * SIM_MOVERS_PER_COMM_SM : s->clusters * (int32_t)width;
    s->task_rate = sim_rate(c) * 1e12 / (p->sms / width);
    s->row_bytes = sim_row_bytes(c) * (c->pass == MK_PASS_BACKWARD ? 2 : 1); /* dout and x */
    s->slot_rows = (c->comm_sms ? p->comm_sm_kib / SIM_MOVERS_PER_COMM_SM : p->mover_kib) * 1024 / s->row_bytes;
    s->slot_rows = s->slot_rows > 8 && !c->comm_sms ? 8 : s->slot_rows;
    s->group_rows = s->slot_rows >= 2 ? (int32_t)(s->slot_rows / 2) : 1;
    s->ranks = calloc((size_t)s->num_ranks, sizeof *s->ranks);
    s->cluster = calloc((size_t)s->num_ranks * (size_t)s->clusters, sizeof *s->cluster);
    s->mover = calloc((size_t)s->num_ranks * (size_t)s->movers, sizeof *s->mover);
    bool ok = s->ranks && s->cluster && s->mover;
    for (int32_t r = 0; r < s->num_ranks && ok; r++)
        ok = set_up_rank(s, r, &tables->ranks[r]);
    return ok && (!sim_strategies[c->strategy].push_dispatch || list_sends(s, tables));
}

static void tear_down(sim_state *s)
{
    for (int32_t i = 0; s->ranks && i < s->num_ranks; i++) {
        sim_rank *r = &s->ranks[i];
        void *own[] = {r->order, r->counters, r->macro_tasks, r->sends, r->weight_seen[0], r->weight_seen[1], r->tile_seen[0], r->tile_seen[1], r->tile_start};
        for (size_t k = 0; k < sizeof own / sizeof own[0]; k++)
            free(own[k]);
    }
    free(s->ranks);
    free(s->cluster);
    free(s->mover);
    free(s->events.heap);
}

/* Everybody draws a first task, then a second, and so on, as they do when a kernel starts. */
static void start_actors(sim_state *s)
{
    int32_t per = s->clusters + s->movers;
    for (int32_t r = 0; r < s->num_ranks; r++) {
        for (int32_t i = 0; i < s->clusters; i++)
            s->cluster[r * s->clusters + i].rank = r, s->cluster[r * s->clusters + i].lane = i;
        for (int32_t i = 0; i < s->movers; i++)
            s->mover[r * s->movers + i].rank = r, s->mover[r * s->movers + i].lane = s->clusters + i;
        for (int32_t round = 0; round <= s->c->profile.tasks_ahead; round++)
            for (int32_t i = 0; i < s->clusters && s->ranks[r].ticket < s->ranks[r].walk.num_tasks; i++) {
                sim_cluster *u = &s->cluster[r * s->clusters + i];
                u->queue[u->queued++] = s->ranks[r].ticket++;
            }
        for (int32_t i = 0; i < per; i++)
            sim_events_push(&s->events, 0, r * per + i);
    }
    s->left = (int64_t)per * s->num_ranks;
}

/* --- results ------------------------------------------------------------------------------------------------------------ */

/* A tile's rows of x (backward: and dout) are in the ring from the first one's way in to the last task that reads them. */
static void note_ring(sim_state *s, const sim_rank *r)
{
    static const int readers[] = {MK_COUNTER_s2_tasks_done, MK_COUNTER_s4_bwd_tasks_done, MK_COUNTER_s2_bwd_tasks_done};
    for (int64_t t = 0; t < r->walk.num_tiles; t++) {
        double end = 0;
        for (int i = 0; i < 3; i++) {
            double time = r->counters[mk_counter_index(&r->t->dims, readers[i], t)].time;
            end = time > end ? time : end;
        }
        if (s->c->pass == MK_PASS_BACKWARD) {
            double time = r->counters[mk_counter_index(&r->t->dims, MK_COUNTER_wgrad_tasks_done, r->table.piece_of_tile[t])].time;
            end = time > end ? time : end;
        }
        if (r->tile_start[t] >= 0 && end > r->tile_start[t])
            sim_series_add(&s->out->ring, r->tile_start[t], end, end - r->tile_start[t]);
    }
}

static void gather(sim_state *s)
{
    sim_result *o = s->out;
    double kernel = 0, total = 0, busiest = 0;
    for (int32_t i = 0; i < s->num_ranks; i++) {
        sim_rank *r = &s->ranks[i];
        for (int32_t u = 0; u < s->clusters; u++) {
            double end = s->cluster[i * s->clusters + u].last_end;
            r->end = end > r->end ? end : r->end;
        }
        r->end = r->landed > r->end ? r->landed : r->end;
        kernel = r->end > kernel ? r->end : kernel;
        o->kernel_mean += r->end / s->num_ranks;
        double bytes = r->link_out_bytes > r->link_in_bytes ? r->link_out_bytes : r->link_in_bytes;
        o->link_bytes_mean += bytes / s->num_ranks;
        busiest = bytes > busiest ? bytes : busiest;
        o->rows_mean += (double)r->t->head.num_rows / s->num_ranks;
        o->rows_max = (double)r->t->head.num_rows > o->rows_max ? (double)r->t->head.num_rows : o->rows_max;
        o->padding_rows += (int64_t)r->t->head.num_tiles * MK_ROW_TILE - r->t->head.num_rows;
        o->ring_rotations += r->t->head.num_tiles / r->t->dims.ring_tiles;
        note_ring(s, r);
    }
    o->kernel = kernel;
    o->link_bytes_max = busiest;
    o->link_use = kernel > 0 ? busiest / (kernel * s->c->profile.link_push_gbps * 1e9) : 0;
    o->signal_seconds /= (double)s->movers * s->num_ranks;
    total = kernel * s->clusters * s->num_ranks;
    double known = 0;
    for (int i = 0; i < SIM_SHARE_TAIL; i++)
        known += s->sum[i];
    s->sum[SIM_SHARE_TAIL] = total > known ? total - known : 0;
    for (int i = 0; i <= SIM_SHARE_TAIL && total > 0; i++)
        s->sum[i] /= total;
    o->shares = (sim_shares){s->sum[0], s->sum[1], s->sum[2], s->sum[3], s->sum[4], s->sum[5], s->sum[6]};
}

double sim_schedule_seconds(const sim_case *c)
{
    const sim_profile *p = &c->profile;
    double routes = (double)(c->tokens * c->dims.num_ranks * c->dims.topk);
    double rows = routes * (double)c->dims.experts_count / (double)c->dims.num_experts;
    return (p->schedule_us + (c->dims.num_ranks > 1 ? p->barrier_us * 4 : 0) + (routes * p->schedule_ns_per_route + rows * p->schedule_ns_per_row) * 1e-3 +
            (double)c->dims.experts_count * p->schedule_us_per_expert) * 1e-6;
}

/* What the fused kernel's neighbours take: opening, copying inputs into the heap, barriers, the weighted sum. */
static void add_ends(const sim_case *c, const sim_tables *tables, sim_result *o)
{
    const sim_profile *p = &c->profile;
    double tokens = (double)c->tokens, h = (double)c->dims.hidden, k = (double)c->dims.topk, barrier = p->barrier_us * (tables->num_ranks > 1 ? 1 : 0.5) * 1e-6;
    double inputs = c->pass == MK_PASS_BACKWARD ? 2 : 1, out_rows = k + 1 + (c->dims.shared_intermediate > 0);
    o->before = p->pass_us * 1e-6 + inputs * 2 * tokens * h * 2 / (p->publish_gbps * 1e9) + barrier;
    o->after = barrier + tokens * h * 2 * out_rows / (p->combine_gbps * 1e9);
    if (sim_strategies[c->strategy].pull_combine && !c->free_link && tables->num_ranks > 1) {
        double most_out = 0, in = 0; /* every token's rows come over the link now */
        for (int32_t r = 0; r < tables->num_ranks; r++) {
            double peer = (double)tables->ranks[r].head.rows_peer;
            most_out = peer > most_out ? peer : most_out;
            in += peer / tables->num_ranks;
        }
        double bytes = (most_out > in ? most_out : in) * h * 2;
        o->after += bytes / (p->link_pull_gbps * (tables->num_ranks > 2 ? p->switch_factor : 1) * 1e9);
        o->link_bytes_mean += in * h * 2;
        o->link_bytes_max += bytes;
    }
    o->seconds = o->before + o->kernel + o->after;
    o->schedule_seconds = sim_schedule_seconds(c);
    double matrices = c->pass == MK_PASS_BACKWARD ? 12 : 6;
    o->flops = matrices * h * (o->rows_mean * tables->num_ranks * (double)c->dims.intermediate + tokens * tables->num_ranks * (double)c->dims.shared_intermediate);
}

bool sim_run(const sim_case *c, const sim_tables *tables, sim_result *out, char *error, size_t error_size)
{
    sim_state s = {0};
    sim_event e;
    memset(out, 0, sizeof *out);
    for (int i = 0; i < MK_NUM_TASK_KINDS; i++)
        out->stage_first[i] = 1e300;
    sim_series_start(&out->link_out, 1e-6);
    sim_series_start(&out->link_in, 1e-6);
    sim_series_start(&out->ring, 1e-6);
    bool ok = set_up(&s, c, tables, out);
    if (!ok)
        snprintf(error, error_size, "out of memory for %d simulated ranks", tables->num_ranks);
    if (ok)
        start_actors(&s);
    while (ok && sim_events_pop(&s.events, &e)) {
        out->events++;
        if (e.actor % (s.clusters + s.movers) < s.clusters)
            sim_cluster_step(&s, e.actor, e.time);
        else
            sim_mover_step(&s, e.actor, e.time);
    }
    if (ok && (s.left || s.events.failed)) {
        snprintf(error, error_size, "the simulated pass stands still: %lld of %lld actors wait for counters that nobody raises",
                 (long long)s.left, (long long)(s.clusters + s.movers) * s.num_ranks);
        ok = false;
    }
    if (ok) {
        gather(&s);
        add_ends(c, tables, out);
    }
    tear_down(&s);
    return ok;
}

bool sim_make_tables(const sim_case *c, sim_tables *tables, char *error, size_t error_size)
{
    const sim_strategy *strategy = &sim_strategies[c->strategy];
    bool no_copies = strategy->push_dispatch || strategy->serial; /* a sender cannot know what is in the receiver's ring; nor are copies known of there */
    if (!sim_tables_make(&c->dims, c->tokens, c->ids, strategy->serial ? c->dims.ring_tiles : 0, no_copies ? SIM_NO_COPIES : c->copy_distance, tables)) {
        snprintf(error, error_size, "out of memory for the row tables of %d ranks", c->dims.num_ranks);
        return false;
    }
    return true;
}

bool sim_on_tables(const sim_case *c, const sim_tables *tables, sim_result *out, char *error, size_t error_size)
{
    if (sim_strategies[c->strategy].phases)
        return sim_phases(c, tables, out) || (snprintf(error, error_size, "out of memory for %d ranks", tables->num_ranks), false);
    if (c->profile.sms - c->comm_sms < c->profile.cluster) {
        snprintf(error, error_size, "%d communication SMs of %g leave no cluster of %g to compute", c->comm_sms, c->profile.sms, c->profile.cluster);
        return false;
    }
    return sim_run(c, tables, out, error, error_size);
}

bool sim_simulate(const sim_case *c, sim_result *out, char *error, size_t error_size)
{
    sim_tables tables;
    if (!sim_make_tables(c, &tables, error, error_size))
        return false;
    bool ok = sim_on_tables(c, &tables, out, error, error_size);
    sim_tables_free(&tables);
    return ok;
}
