/* One stage at a time: a workspace of one rank with a real row table, a mk_cpu_run as cpu/pass.c would make it, and helpers to fill
 * buffers with numbers, run all tasks of a kind, and compare with plain loops. The ring holds the whole table, so that ring
 * row and table row are the same number. Everything that no test fills is NaN. */
#ifndef MOK_TEST_STAGE_H
#define MOK_TEST_STAGE_H
#include "../multi/ranks.h"
#include "cpu/run.h"

typedef struct stage {
    mok_group *group;
    mok_workspace *w;
    mok_config cfg;
    mk_call call;
    mok_weights weights;
    mok_grads grads;
    mk_cpu_run run;
    mk_cpu_scratch *scratch;
    void *schedule, *context;
    int64_t tokens, rows; /* rows: of the table, padding included */
    uint64_t state;
    void *owned[32];
    int num_owned;
} stage;

static inline void *stage_own(stage *s, int64_t bytes)
{
    void *p = ranks_block(bytes);
    s->owned[s->num_owned++] = p;
    return p;
}

/* n random bf16 of the size given. */
static inline void stage_fill(stage *s, mk_bf16 *to, int64_t n, double size)
{
    for (int64_t i = 0; i < n; i++)
        to[i] = mk_float_to_bf16((float)(test_normal(&s->state) * size));
}
static inline mk_bf16 *stage_random(stage *s, int64_t n, double size)
{
    mk_bf16 *p = (mk_bf16 *)stage_own(s, 2 * n);
    stage_fill(s, p, n, size);
    return p;
}

/* Random weights in the layout of cfg; `up` and shared_up stay empty where gate and up are one. */
static inline void stage_weights(stage *s)
{
    const mok_config *c = &s->cfg;
    int64_t routed = c->num_experts * c->intermediate * c->hidden, shared = c->shared_intermediate * c->hidden;
    int64_t times = c->gate_up == MOK_GATE_UP_SEPARATE ? 1 : 2;
    s->weights.gate.packed = stage_random(s, routed * times, 0.2);
    s->weights.down.packed = stage_random(s, routed, 0.2);
    s->weights.shared_gate.packed = stage_random(s, shared * times, 0.2);
    s->weights.shared_down.packed = stage_random(s, shared, 0.2);
    s->weights.shared_output_gate = stage_random(s, c->hidden, 0.2);
    if (times == 1) {
        s->weights.up.packed = stage_random(s, routed, 0.2);
        s->weights.shared_up.packed = stage_random(s, shared, 0.2);
    }
}

/* Element (n, k) of [outputs, inputs] of a weight, from the words of mok.h. `which`: 0 gate, 1 up, 2 down. */
static inline int64_t stage_element(const mok_config *c, int which, int64_t outputs, int64_t inputs, int64_t expert, int64_t n, int64_t k)
{
    int64_t rows = outputs, row = n;
    if (which < 2 && c->gate_up == MOK_GATE_UP_COMBINED) {
        rows = 2 * outputs;
        row = which ? outputs + n : n;
    } else if (which < 2 && c->gate_up == MOK_GATE_UP_INTERLEAVED) {
        rows = 2 * outputs;
        row = 2 * n + which;
    }
    int64_t in_matrix = c->weight_layout == MOK_WEIGHT_KN ? k * rows + row : row * inputs + k;
    return expert * rows * inputs + in_matrix;
}
static inline float stage_weight(const stage *s, int which, bool shared, int64_t expert, int64_t n, int64_t k)
{
    const mok_config *c = &s->cfg;
    int64_t width = shared ? c->shared_intermediate : c->intermediate, outputs = which == 2 ? c->hidden : width, inputs = which == 2 ? width : c->hidden;
    const mok_weight *gate = shared ? &s->weights.shared_gate : &s->weights.gate, *up = shared ? &s->weights.shared_up : &s->weights.up;
    const mok_weight *down = shared ? &s->weights.shared_down : &s->weights.down;
    const mok_weight *from = which == 2 ? down : which == 1 && c->gate_up == MOK_GATE_UP_SEPARATE ? up : gate;
    return mk_bf16_to_float(((const mk_bf16 *)from->packed)[stage_element(c, which, outputs, inputs, expert, n, k)]);
}

/* cfg: shape and options; the ring becomes large enough for any table. ids: [tokens, K]. */
static inline bool stage_open(stage *s, const mok_config *cfg, int64_t tokens, const int32_t *ids)
{
    memset(s, 0, sizeof *s);
    s->state = test_seed();
    s->tokens = tokens;
    mok_config c = *cfg;
    mok_plan plan = MOK_INIT(mok_plan);
    c.max_tokens = tokens > 1 ? tokens : 1;
    c.backend = MOK_BACKEND_CPU;
    c.cpu_threads = 1;
    if (!c.ring_rows) {
        c.minibatch_rows = c.minibatch_rows_bwd = 128;
        c.ring_rows = c.max_tokens * c.topk + 128 * c.num_experts + 256;
    }
    if (mok_group_create_local(1, NULL, &s->group) != MOK_OK || mok_workspace_create(s->group, &c, &s->w) != MOK_OK) {
        TEST_FAILED("%s", mok_last_error());
        return false;
    }
    s->cfg = MOK_INIT(mok_config);
    mok_workspace_config(s->w, &s->cfg);
    mok_workspace_plan(s->w, &plan);
    s->schedule = stage_own(s, plan.schedule_bytes);
    s->context = stage_own(s, plan.context_bytes);
    mok_schedule_args a = MOK_INIT(mok_schedule_args);
    a.num_tokens = tokens;
    a.expert_ids = ids;
    a.schedule = s->schedule;
    if (mok_schedule(s->w, &a, NULL) != MOK_OK) {
        TEST_FAILED("%s", mok_last_error());
        return false;
    }
    const mk_memory *m = &s->w->memory;
    memset(s->w->local, 0xff, (size_t)s->w->memory.local_bytes);
    memset(s->w->heap + m->router_weights, 0xff, (size_t)(m->heap_bytes - m->router_weights));
    stage_weights(s);
    return true;
}

static inline void stage_close(stage *s)
{
    mok_workspace_destroy(s->w);
    mok_group_destroy(s->group);
    for (int i = 0; i < s->num_owned; i++)
        free(s->owned[i]);
}

/* A run of one pass, as cpu/pass.c sets it up. saved_rows: of the context (a multiple of 128). */
static inline mk_cpu_run *stage_pass(stage *s, mk_pass pass)
{
    mk_cpu_run *run = &s->run;
    const mk_memory *m = &s->w->memory;
    char *local = s->w->local, *kept = (char *)s->context;
    memset(run, 0, sizeof *run);
    memset(&s->call, 0, sizeof s->call);
    s->call.operation = pass == MK_PASS_BACKWARD ? MK_OP_BACKWARD : pass == MK_PASS_FORWARD ? MK_OP_FORWARD : MK_OP_RECOMPUTE;
    s->call.num_tokens = s->tokens;
    run->w = s->w;
    run->d = &s->w->dims;
    run->call = &s->call;
    run->table = mk_table_at(m, s->schedule);
    run->weights = &s->weights;
    run->grads = pass == MK_PASS_BACKWARD ? &s->grads : NULL;
    run->need_x = true;
    run->mx = run->d->mx;
    run->own_x = (const mk_bf16 *)(const void *)(s->w->heap + m->x); /* MXFP8: a test sets its own */
    run->own_dout = (const mk_bf16 *)(const void *)(s->w->heap + m->dout);
    run->want_data = run->want_weights = pass == MK_PASS_BACKWARD;
#define STAGE_LOCAL(type, field) run->field = (type *)(void *)(local + m->field)
    STAGE_LOCAL(mk_bf16, ring_x); STAGE_LOCAL(mk_bf16, ring_dout); STAGE_LOCAL(mk_bf16, ring_gate); STAGE_LOCAL(mk_bf16, ring_up);
    STAGE_LOCAL(mk_bf16, ring_h); STAGE_LOCAL(float, ring_weight); STAGE_LOCAL(float, ring_dweight);
    STAGE_LOCAL(mk_bf16, shared_gate); STAGE_LOCAL(mk_bf16, shared_up); STAGE_LOCAL(mk_bf16, shared_h); STAGE_LOCAL(mk_bf16, shared_y);
    STAGE_LOCAL(float, shared_scale); STAGE_LOCAL(float, shared_dpartial); STAGE_LOCAL(float, wgrad_partial); STAGE_LOCAL(uint32_t, counters);
#undef STAGE_LOCAL
    memset(run->counters, 0, sizeof(uint32_t) * (size_t)(MK_NUM_TILE_COUNTERS * run->d->capacity_tiles + MK_MAX_PIECES(run->d)));
    if (run->d->saved_tiles) {
        run->saved_gate = (mk_bf16 *)(void *)(kept + m->saved_gate);
        run->saved_up = (mk_bf16 *)(void *)(kept + m->saved_up);
        run->saved_shared_gate = (mk_bf16 *)(void *)(kept + m->saved_shared_gate);
        run->saved_shared_up = (mk_bf16 *)(void *)(kept + m->saved_shared_up);
        run->keep_shared = true;
    }
    mk_walk *walk = &run->walk;
    mk_grid *g = &walk->grid;
#define STAGE_PARTS(width) ((int32_t)mk_ceil_div(width, MK_CPU_COLS))
    walk->pass = pass;
    walk->num_tiles = run->table.head->num_tiles;
    walk->mb_tiles = pass == MK_PASS_BACKWARD ? run->d->mb_tiles_bwd : run->d->mb_tiles_fwd;
    walk->shared_tiles = run->d->shared_intermediate ? mk_ceil_div(s->tokens, MK_ROW_TILE) : 0;
    walk->replay_from = mk_min(run->d->saved_tiles, walk->num_tiles);
    walk->piece_first = run->table.piece_first;
    walk->num_pieces = run->table.head->num_pieces;
    *g = (mk_grid){.dispatch = 1, .gate_up = STAGE_PARTS(s->cfg.intermediate), .shared_gate_up = STAGE_PARTS(s->cfg.shared_intermediate)};
    if (pass == MK_PASS_FORWARD)
        g->down = g->shared_down = STAGE_PARTS(s->cfg.hidden);
    if (pass == MK_PASS_BACKWARD) {
        g->dgrad_down = STAGE_PARTS(s->cfg.intermediate);
        g->shared_dgrad_down = STAGE_PARTS(s->cfg.shared_intermediate);
        g->dgrad_gate_up = g->shared_dgrad_gate_up = STAGE_PARTS(s->cfg.hidden);
        g->wgrad = mk_cpu_wgrad_tasks(run->d, false);
        g->shared_wgrad = s->cfg.shared_intermediate ? mk_cpu_wgrad_tasks(run->d, true) + s->cfg.shared_gate : 0;
    }
#undef STAGE_PARTS
    mk_walk_count(walk);
    s->scratch = &((mk_cpu_state *)s->w->state)->scratch[0];
    s->rows = walk->num_tiles * MK_ROW_TILE;
    return run;
}

/* All tasks of one kind, in the order of the walk. Returns how many. */
static inline int64_t stage_each(stage *s, mk_task_kind kind, void (*stage_fn)(mk_cpu_run *, mk_cpu_scratch *, mk_task))
{
    int64_t count = 0;
    for (int64_t i = 0; i < s->run.walk.num_tasks; i++) {
        mk_task task = mk_walk_task(&s->run.walk, i);
        if (task.kind != kind)
            continue;
        stage_fn(&s->run, s->scratch, task);
        count++;
    }
    return count;
}

static inline bool stage_valid(const stage *s, int64_t row) { return s->run.table.rows[row].src_rank >= 0; }
static inline int64_t stage_expert(const stage *s, int64_t row)
{
    return mk_expert_of_tile(&s->run.table, row / MK_ROW_TILE);
}
/* Fills every valid row of a [ring, width] buffer; padding stays NaN. */
static inline void stage_fill_rows(stage *s, mk_bf16 *ring, int64_t width, double size)
{
    for (int64_t r = 0; r < s->rows; r++)
        if (stage_valid(s, r))
            stage_fill(s, ring + r * width, width, size);
}

/* value is the bf16 nearest to want, give or take the rounding of sums: |want| of one place, and `slack`. */
static inline void stage_near(const char *what, int64_t row, int64_t col, double value, double want, double slack)
{
    if (!(fabs(value - want) <= fabs(want) * 0x1p-8 + slack))
        TEST_FAILED("%s[%lld][%lld] is %.9g; expected %.9g", what, (long long)row, (long long)col, value, want);
}
static inline void stage_same(const char *what, int64_t row, int64_t col, uint32_t value, uint32_t want)
{
    if (value != want)
        TEST_FAILED("%s[%lld][%lld] has bits %08x; expected %08x", what, (long long)row, (long long)col, value, want);
}
static inline uint32_t stage_bits(float f)
{
    uint32_t b;
    memcpy(&b, &f, 4);
    return b;
}
/* A buffer that nobody may have written to. */
static inline void stage_untouched(const char *what, const void *memory, int64_t bytes)
{
    const unsigned char *p = (const unsigned char *)memory;
    for (int64_t i = 0; i < bytes; i++)
        if (p[i] != 0xff) {
            TEST_FAILED("%s was written to at byte %lld", what, (long long)i);
            return;
        }
}

/* How far apart columns of a width are looked at: every residue of 64 is met, but a slow build looks at fewer. */
#define STAGE_STEP(width) (((width) > 256 ? 7 : 1) * (RANKS_SLOW ? 5 : 1))

/* Shapes: one row tile and less, several, a width of more than one task, empty experts, dropped routes. */
typedef struct stage_shape { int64_t hidden, intermediate, shared, experts, topk, tokens; } stage_shape;
static const stage_shape stage_shapes[] __attribute__((unused)) = {
    {64, 64, 0, 3, 1, 1}, {64, 128, 64, 5, 2, 100}, {128, 64, 192, 2, 2, 129}, {64, 576, 576, 4, 2, 20}, {576, 64, 64, 3, 3, 70}, {640, 640, 640, 2, 1, 5},
};
enum { STAGE_NUM_SHAPES = 6 };

static inline mok_config stage_config(const stage_shape *shape)
{
    return ranks_config(shape->hidden, shape->intermediate, shape->experts, shape->topk, shape->tokens > 1 ? shape->tokens : 1);
}
/* Expert 0 gets nothing where there are several; some routes are dropped. */
static inline int32_t *stage_ids(const stage_shape *shape, uint64_t seed)
{
    int64_t n = shape->tokens * shape->topk;
    int32_t *ids = (int32_t *)malloc(sizeof *ids * (size_t)(n + 1));
    for (int64_t i = 0; i < n; i++)
        ids[i] = test_below(&seed, 8) == 0 && n > 4 ? -1 : (int32_t)(shape->experts > 1 ? 1 + test_below(&seed, shape->experts - 1) : 0);
    return ids;
}
/* Opens the index-th shape. */
static inline bool stage_open_shape(stage *s, int index, bool shared, void (*change)(mok_config *))
{
    const stage_shape *shape = &stage_shapes[index];
    mok_config c = stage_config(shape);
    c.shared_intermediate = shared ? shape->shared : 0;
    if (change)
        change(&c);
    int32_t *ids = stage_ids(shape, test_seed() + (uint64_t)index);
    bool ok = stage_open(s, &c, shape->tokens, ids);
    free(ids);
    return ok;
}
#endif
