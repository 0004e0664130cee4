/* One pass: publish the inputs, meet, walk the tasks with all workers, meet again, reduce. Forward, recompute and backward are three
 * walks over the same stages. */
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "cpu/call.h"
#include "cpu/run.h"
#include "cpu/trace.h"

/* --- waiting and signalling ---------------------------------------------------------------------------------------- */
static uint32_t *counter_at(mk_cpu_run *run, int32_t counter, int64_t index) { return run->counters + mk_counter_index(run->d, counter, index); }

static const char *counter_name(int32_t counter)
{
    static const char *const names[] = {
#define NAME(space, name, writer, reader, need) #name,
        MK_COUNTER_LIST(NAME)
#undef NAME
    };
    return names[counter];
}

void mk_cpu_fail(mk_cpu_run *run, mok_status status)
{
    int32_t none = 0;
    if (__atomic_compare_exchange_n(&run->failed, &none, 1, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
        run->status = status;
        snprintf(run->sentence, sizeof run->sentence, "%s", mok_last_error());
    }
}

bool mk_cpu_wait_counter(mk_cpu_run *run, int32_t counter, int64_t index, uint32_t count)
{
    uint32_t spins = 0, seen;
    int64_t deadline = 0;
    /* Acquire: the counted tasks' writes are visible; pairs with the release in mk_cpu_signal. */
    while ((seen = __atomic_load_n(counter_at(run, counter, index), __ATOMIC_ACQUIRE)) < count) {
        if (__atomic_load_n(&run->failed, __ATOMIC_RELAXED))
            return false;
        mk_cpu_relax(&spins);
        if (spins % 256)
            continue;
        if (!deadline)
            deadline = mk_cpu_now_ms() + run->w->config.timeout_ms;
        if (mk_cpu_now_ms() > deadline) {
            mk_cpu_fail(run, mk_fail(MOK_E_BUG, "rank %d waited for %s[%lld] to reach %u; it is %u", run->d->rank, counter_name(counter),
                                     (long long)index, count, seen));
            return false;
        }
    }
    return true;
}

uint32_t mk_cpu_signal(mk_cpu_run *run, int32_t counter, int64_t index, uint32_t n)
{
    return __atomic_add_fetch(counter_at(run, counter, index), n, __ATOMIC_ACQ_REL);
}

mk_rows mk_rows_of_task(const mk_cpu_run *run, mk_task task)
{
    const mk_dims *d = run->d;
    bool shared = task.kind >= MK_TASK_SHARED_GATE_UP && task.kind <= MK_TASK_SHARED_WGRAD;
    int64_t first = (int64_t)task.tile * MK_ROW_TILE;
    if (shared)
        return (mk_rows){true, 0, mk_min(MK_ROW_TILE, run->call->num_tokens - first), first, -1, d->shared_intermediate};
    int64_t e = mk_expert_of_tile(&run->table, task.tile);
    return (mk_rows){false, e, mk_valid_rows(&run->table, task.tile), mk_ring_row(run, task.tile), first, d->intermediate};
}

/* --- the walk ------------------------------------------------------------------------------------------------------- */
static void run_task(mk_cpu_run *run, mk_cpu_scratch *scratch, mk_task task)
{
    switch (task.kind) {
    case MK_TASK_DISPATCH: mk_cpu_s1_dispatch(run, task); break;
    case MK_TASK_SHARED_GATE_UP:
    case MK_TASK_GATE_UP: mk_cpu_s2_gate_up(run, scratch, task); break;
    case MK_TASK_SHARED_DOWN:
    case MK_TASK_DOWN: mk_cpu_s4_down(run, scratch, task); break;
    case MK_TASK_SHARED_DGRAD_DOWN:
    case MK_TASK_DGRAD_DOWN: mk_cpu_s4_down_bwd(run, scratch, task); break;
    case MK_TASK_SHARED_DGRAD_GATE_UP:
    case MK_TASK_DGRAD_GATE_UP: mk_cpu_s2_gate_up_bwd(run, scratch, task); break;
    case MK_TASK_SHARED_WGRAD: mk_cpu_shared_wgrad(run, scratch, task); break;
    case MK_TASK_WGRAD: mk_cpu_wgrad(run, scratch, task); break;
    default: break;
    }
}

static void finish_task(mk_cpu_run *run, mk_task task)
{
    int counter = mk_task_counter(task.kind);
    if (counter < 0)
        return;
    uint32_t amount = 1;
    if (task.kind == MK_TASK_DISPATCH)
        amount = (uint32_t)mk_valid_rows(&run->table, task.tile);
    uint32_t done = mk_cpu_signal(run, counter, task.tile, amount);
    if (task.kind != MK_TASK_WGRAD || done != (uint32_t)run->walk.grid.wgrad || !run->grads->ready)
        return;
    const mk_piece *piece = &run->table.pieces[task.tile];
    if (piece->is_last) /* release: the expert's gradients are complete; pairs with the caller's acquire */
        __atomic_store_n(&run->grads->ready[piece->expert], run->grads->ready_value, __ATOMIC_RELEASE);
}

/* Rows of a tile whose token is another rank's, and how many of them are pulled. */
static void count_peer_rows(const mk_cpu_run *run, int64_t tile, uint8_t *peer_rows, uint32_t *pulled)
{
    bool backward = run->walk.pass == MK_PASS_BACKWARD;
    for (int64_t i = 0; i < MK_ROW_TILE; i++) {
        const mk_row *row = &run->table.rows[tile * MK_ROW_TILE + i];
        bool peer = row->src_rank >= 0 && row->src_rank != run->d->rank;
        int64_t from = backward ? row->copy_bwd : row->copy_fwd;
        *peer_rows = (uint8_t)(*peer_rows + peer);
        *pulled += peer && (from < 0 || from / MK_ROW_TILE >= run->walk.num_tiles);
    }
}

/* What a finished task is in the trace. Products carry their epilogues with them here. */
static mk_trace_event describe(const mk_cpu_run *run, mk_task task)
{
    mk_trace_event e = {.tile = task.tile, .part = (uint16_t)task.part, .kind = (uint8_t)mk_trace_kind_of(task.kind),
                        .shared = (uint8_t)mk_trace_is_shared(task.kind)};
    int64_t row_bytes = MK_ROW_BYTES(run->d, run->d->hidden);
    uint32_t pulled = 0;
    if (task.kind == MK_TASK_DISPATCH) {
        count_peer_rows(run, task.tile, &e.peer_rows, &pulled);
        e.link_bytes = pulled * (uint32_t)(row_bytes * (run->walk.pass == MK_PASS_BACKWARD ? 1 + run->need_x : 1));
    } else if (task.kind == MK_TASK_DOWN || task.kind == MK_TASK_DGRAD_GATE_UP) {
        bool dweight = task.kind == MK_TASK_DGRAD_GATE_UP && task.part == 0;
        e.link_bytes = (uint32_t)(2 * mk_num_cols(task.part, run->d->hidden) + 4 * dweight); /* of one row: see layout/trace.h */
    }
    return e;
}

static void walk_tasks(void *argument, int32_t worker)
{
    mk_cpu_run *run = argument;
    mk_cpu_scratch *scratch = &((mk_cpu_state *)run->w->state)->scratch[worker];
    mk_need needs[MK_MAX_NEEDS];
    while (!__atomic_load_n(&run->failed, __ATOMIC_RELAXED)) {
        mk_task task = mk_walk_task(&run->walk, __atomic_fetch_add(&run->ticket, 1, __ATOMIC_RELAXED));
        if (task.kind == MK_TASK_NONE)
            return;
        int n = mk_task_needs(&run->walk, &run->table, run->d, task, needs);
        uint64_t begin = mk_cpu_trace_time(run->w);
        for (int i = 0; i < n; i++)
            for (int32_t index = needs[i].first; index < needs[i].end; index++)
                if (!mk_cpu_wait_counter(run, needs[i].counter, index, needs[i].count))
                    return;
        if (begin) {
            mk_trace_event e = describe(run, task);
            e.kind = task.kind == MK_TASK_DISPATCH ? MK_TRACE_wait_slot : MK_TRACE_wait_operands;
            e.link_bytes = e.peer_rows = 0;
            begin = n ? mk_cpu_trace(run->w, worker, begin, e) : begin;
        }
        run_task(run, scratch, task);
        if (begin)
            mk_cpu_trace(run->w, worker, begin, describe(run, task));
        finish_task(run, task);
    }
}

/* Tokens of one worker: contiguous shares. */
static void share_of(const mk_cpu_run *run, int32_t worker, int64_t *first, int64_t *end)
{
    int64_t workers = mk_pool_size(((mk_cpu_state *)run->w->state)->pool), tokens = run->call->num_tokens;
    *first = tokens * worker / workers;
    *end = tokens * (worker + 1) / workers;
}

static void scale_tokens(void *argument, int32_t worker)
{
    mk_cpu_run *run = argument;
    int64_t first, end;
    share_of(run, worker, &first, &end);
    for (int64_t t = first; t < end; t++)
        run->shared_scale[t] = mk_cpu_shared_gate(run, t);
}

static void reduce_tokens(void *argument, int32_t worker)
{
    mk_cpu_run *run = argument;
    int64_t first, end;
    bool forward = run->walk.pass == MK_PASS_FORWARD;
    uint64_t begin = mk_cpu_trace_time(run->w);
    share_of(run, worker, &first, &end);
    if (forward)
        mk_cpu_s5_combine(run, first, end);
    else
        mk_cpu_s5_combine_bwd(run, first, end);
    mk_cpu_trace_plain(run->w, worker, begin, forward ? MK_TRACE_s5_reduce : MK_TRACE_s5_reduce_bwd, 0);
}

/* --- setting up ------------------------------------------------------------------------------------------------------ */
/* Quantised once, here, for all who pull them. */
static void publish_mx(mk_cpu_run *run, const mk_bf16 *tokens, int64_t first, int64_t end, int64_t offset)
{
    int64_t hidden = run->d->hidden;
    for (int64_t t = first; t < end; t++) {
        uint8_t *to = (uint8_t *)run->w->heap + offset + t * MK_ROW_STRIDE(run->d, hidden);
        mk_count(&run->counted.mx_not_finite, mk_cpu_mx_quantise(tokens + t * hidden, hidden, to, to + hidden));
    }
}

static void publish_share_mx(void *argument, int32_t worker)
{
    mk_cpu_run *run = argument;
    int64_t first, end;
    share_of(run, worker, &first, &end);
    publish_mx(run, run->own_x, first, end, run->w->memory.x);
    if (run->own_dout)
        publish_mx(run, run->own_dout, first, end, run->w->memory.dout);
}

/* In MXFP8 the shared expert reads the caller's own x and dout, else what is published. */
static void publish(mk_cpu_run *run, const void *x, const void *dout, const void *router_weights)
{
    const mk_memory *m = &run->w->memory;
    int64_t tokens = run->call->num_tokens, routes = tokens * run->d->topk;
    size_t bytes = 2 * (size_t)(tokens * run->d->hidden);
    run->own_x = run->mx ? x : run->w->heap + m->x;
    run->own_dout = run->mx ? dout : run->w->heap + m->dout;
    if (!tokens)
        return;
    if (run->mx)
        mk_pool_run(((mk_cpu_state *)run->w->state)->pool, publish_share_mx, run);
    else
        memcpy(run->w->heap + m->x, x, bytes);
    if (!run->mx && dout)
        memcpy(run->w->heap + m->dout, dout, bytes);
    float *weights = (float *)(void *)(run->w->heap + m->router_weights);
    if (router_weights && run->w->config.router_dtype == MOK_BF16)
        for (int64_t i = 0; i < routes; i++)
            weights[i] = mk_bf16_to_float(((const mk_bf16 *)router_weights)[i]);
    else if (router_weights)
        memcpy(weights, router_weights, sizeof *weights * (size_t)routes);
}

static void locate_memory(mk_cpu_run *run, void *context)
{
    char *local = run->w->local, *kept = context;
    const mk_memory *m = &run->w->memory;
#define LOCAL(field) run->field = (void *)(local + m->field)
    LOCAL(ring_x); LOCAL(ring_dout); LOCAL(ring_gate); LOCAL(ring_up); LOCAL(ring_h); LOCAL(ring_weight); LOCAL(ring_dweight);
    LOCAL(shared_gate); LOCAL(shared_up); LOCAL(shared_h); LOCAL(shared_y); LOCAL(shared_scale); LOCAL(shared_dpartial);
    LOCAL(wgrad_partial); LOCAL(counters);
#undef LOCAL
    if (kept && run->d->saved_tiles) {
        run->saved_gate = (void *)(kept + m->saved_gate);
        run->saved_up = (void *)(kept + m->saved_up);
        run->saved_shared_gate = (void *)(kept + m->saved_shared_gate);
        run->saved_shared_up = (void *)(kept + m->saved_shared_up);
        run->keep_shared = true;
    }
}

static int32_t parts_of(int64_t width) { return (int32_t)mk_ceil_div(width, MK_CPU_COLS); }

static void plan_walk(mk_cpu_run *run, mk_pass pass)
{
    const mk_dims *d = run->d;
    mk_walk *walk = &run->walk;
    mk_grid *g = &walk->grid;
    bool shared = d->shared_intermediate > 0 && run->call->num_tokens > 0;
    walk->pass = pass;
    walk->num_tiles = run->table.head->num_tiles;
    walk->mb_tiles = pass == MK_PASS_BACKWARD ? d->mb_tiles_bwd : d->mb_tiles_fwd;
    walk->shared_tiles = shared ? mk_ceil_div(run->call->num_tokens, MK_ROW_TILE) : 0;
    walk->replay_from = mk_min(d->saved_tiles, walk->num_tiles);
    g->dispatch = 1;
    g->gate_up = parts_of(d->intermediate);
    g->shared_gate_up = parts_of(d->shared_intermediate);
    switch (pass) {
    case MK_PASS_FORWARD:
        g->down = parts_of(d->hidden);
        g->shared_down = g->down;
        break;
    case MK_PASS_RECOMPUTE:
        walk->num_tiles = walk->replay_from;
        g->shared_gate_up = run->keep_shared ? g->shared_gate_up : 0;
        break;
    case MK_PASS_BACKWARD:
        g->shared_gate_up = run->keep_shared ? 0 : g->shared_gate_up;
        g->dgrad_down = parts_of(d->intermediate);
        g->shared_dgrad_down = parts_of(d->shared_intermediate);
        if (run->want_data)
            g->dgrad_gate_up = g->shared_dgrad_gate_up = parts_of(d->hidden);
        if (run->want_weights) {
            g->wgrad = mk_cpu_wgrad_tasks(d, false);
            g->shared_wgrad = d->shared_intermediate ? mk_cpu_wgrad_tasks(d, true) + run->w->config.shared_gate : 0;
        }
        walk->piece_first = run->table.piece_first;
        walk->num_pieces = run->table.head->num_pieces;
        break;
    }
    mk_walk_count(walk);
}

/* Counters of this pass start at 0: those of the table's live tiles, not of its capacity. */
static void clear_counters(mk_cpu_run *run)
{
    for (int32_t c = 0; c < MK_NUM_COUNTERS; c++) {
        int64_t n = c < MK_NUM_TILE_COUNTERS ? run->table.head->num_tiles
                    : c == MK_COUNTER_wgrad_tasks_done ? run->table.head->num_pieces : run->walk.shared_tiles;
        if (n)
            memset(counter_at(run, c, 0), 0, sizeof(uint32_t) * (size_t)n);
    }
}

static bool any_grad(const mok_grads *g)
{
    const mok_grad *all[] = {&g->gate, &g->up, &g->down, &g->shared_gate, &g->shared_up, &g->shared_down, &g->shared_output_gate};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i]->packed || all[i]->experts)
            return true;
    return g->ready != NULL;
}

static void add_stats(mk_cpu_run *run)
{
    mok_stats *to = &run->w->stats;
    const mok_stats *c = &run->counted;
    to->rows += c->rows;
    to->rows_pulled += c->rows_pulled;
    to->rows_pulled_peer += c->rows_pulled_peer;
    to->rows_copied += c->rows_copied;
    to->rows_replayed += c->rows_replayed;
    to->rows_padding += c->rows_padding;
    to->wgrad_continued += c->wgrad_continued;
    to->bytes_pulled_peer += c->bytes_pulled_peer;
    to->bytes_pushed_peer += c->bytes_pushed_peer;
    to->mx_not_finite += c->mx_not_finite;
    to->ring_rotations += run->walk.num_tiles / run->d->ring_tiles;
}

/* Between the two barriers: every task of the pass. */
static mok_status walk_pass(mk_cpu_run *run)
{
    mk_pool *pool = ((mk_cpu_state *)run->w->state)->pool;
    clear_counters(run);
    if (run->walk.pass == MK_PASS_BACKWARD && run->walk.shared_tiles)
        mk_pool_run(pool, scale_tokens, run);
    mk_pool_run(pool, walk_tasks, run);
    add_stats(run);
    if (run->failed)
        return mk_fail(run->status, "%s", run->sentence);
    return MOK_OK;
}

static void write_context_head(const mk_cpu_run *run, void *context)
{
    mk_context_head *h = context;
    *h = (mk_context_head){MK_CONTEXT_MAGIC, run->w->fingerprint, run->table.head->number, run->call->num_tokens, run->d->saved_tiles};
}

/* dWd is of dout and w h: only gate's and up's gradients need the rows of x again. */
static bool wants_x(const mok_grads *g) { return g->gate.packed || g->gate.experts || g->up.packed || g->up.experts; }

mok_status mk_cpu_pass(mok_workspace *w, const mk_call *call)
{
    bool backward = call->operation == MK_OP_BACKWARD, forward = call->operation == MK_OP_FORWARD;
    const mok_forward_args *f = &call->forward;
    const mok_backward_args *b = &call->backward;
    mk_cpu_run run = {.w = w, .d = &w->dims, .call = call, .need_x = true, .mx = w->dims.mx};
    run.table = mk_table_at(&w->memory, (void *)(uintptr_t)(backward ? b->schedule : f->schedule));
    run.weights = backward ? &b->weights : &f->weights;
    run.grads = backward ? &b->grads : NULL;
    run.want_data = backward && b->parts != MOK_BACKWARD_WEIGHTS;
    run.want_weights = backward && b->parts != MOK_BACKWARD_DATA && any_grad(&b->grads);
    locate_memory(&run, backward ? (void *)(uintptr_t)b->context : f->context);
    plan_walk(&run, backward ? MK_PASS_BACKWARD : forward ? MK_PASS_FORWARD : MK_PASS_RECOMPUTE);
    if (backward)
        run.need_x = (run.want_weights && wants_x(&b->grads)) || run.walk.replay_from < run.walk.num_tiles;

    uint64_t begin = mk_cpu_trace_plain(w, 0, mk_cpu_trace_time(w), MK_TRACE_call, call->operation);
    MK_TRY(mk_cpu_call_open(w, call, run.table.head->number));
    if (backward)
        publish(&run, b->x, b->dout, b->router_weights);
    else
        publish(&run, f->x, NULL, forward ? f->router_weights : NULL);
    begin = mk_cpu_trace_plain(w, 0, begin, MK_TRACE_publish, 0);
    MK_TRY(mk_cpu_call_meet(w, call));
    mk_cpu_trace_plain(w, 0, begin, MK_TRACE_rank_barrier, 0);
    mok_status status = walk_pass(&run);
    if (status != MOK_OK) {
        w->broken = true;
        return status;
    }
    begin = mk_cpu_trace_time(w);
    MK_TRY(mk_cpu_barrier(w, backward ? "the end of backward" : forward ? "the end of forward" : "the end of recompute", call->layer));
    mk_cpu_trace_plain(w, 0, begin, MK_TRACE_rank_barrier, 1);
    if (forward || run.want_data)
        mk_pool_run(((mk_cpu_state *)w->state)->pool, reduce_tokens, &run);
    if (!backward && f->context)
        write_context_head(&run, f->context);
    int64_t *passes = backward ? &w->stats.backwards : forward ? &w->stats.forwards : &w->stats.recomputes;
    ++*passes;
    return MOK_OK;
}
