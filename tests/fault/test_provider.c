/* Groups whose peer pointers come from the caller (mok_provider): a small implementation over threads with shared memory, its layer
 * bit for bit that of a local group, and its functions failing one after the other. */
#include "../multi/ranks.h"
#include "../unit/bad_config.h"

enum { MAX_P = 4, TOKENS = 45 };

typedef enum function { ALL_GATHER, HEAP_ALLOC, HEAP_FREE } function;

/* What the ranks share. A function fails, on all ranks or on one, at its `fail_at`-th call. */
typedef struct board {
    pthread_barrier_t barrier;
    int32_t ranks;
    const void *sent[MAX_P];
    void *heap[MAX_P];
    size_t bytes[MAX_P];
    function failing;
    int fail_at;             /* 0: never */
    int32_t fail_rank;       /* -1: all */
    bool forget_a_peer;      /* heap_alloc succeeds, but has no pointer to rank 0 for the failing ranks */
    int64_t live_heaps, allocs, frees, gathers;
} board;

typedef struct seat { board *b; int32_t rank; int calls[3]; } seat;

static bool fails_now(seat *s, function f)
{
    board *b = s->b;
    return ++s->calls[f] == b->fail_at && b->failing == f && (b->fail_rank < 0 || b->fail_rank == s->rank);
}

static int board_all_gather(void *user, const void *send, void *recv, size_t bytes)
{
    seat *s = user;
    board *b = s->b;
    bool fails = fails_now(s, ALL_GATHER);
    b->sent[s->rank] = send;
    b->bytes[s->rank] = bytes;
    pthread_barrier_wait(&b->barrier);
    for (int32_t r = 0; r < b->ranks; r++) {
        CHECK_EQ(b->bytes[r], bytes);
        memcpy((char *)recv + (size_t)r * bytes, b->sent[r], bytes);
    }
    __atomic_add_fetch(&b->gathers, 1, __ATOMIC_RELAXED);
    pthread_barrier_wait(&b->barrier);
    return fails ? 7 : 0;
}

static int board_heap_alloc(void *user, size_t bytes, void **peers)
{
    seat *s = user;
    board *b = s->b;
    bool fails = fails_now(s, HEAP_ALLOC);
    void *own = fails && !b->forget_a_peer ? NULL : aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (own) {
        memset(own, 0, bytes);
        __atomic_add_fetch(&b->live_heaps, 1, __ATOMIC_RELAXED);
        __atomic_add_fetch(&b->allocs, 1, __ATOMIC_RELAXED);
    }
    b->heap[s->rank] = own;
    pthread_barrier_wait(&b->barrier);
    for (int32_t r = 0; r < b->ranks && own; r++)
        peers[r] = b->heap[r] ? b->heap[r] : own; /* a rank that has none reports it itself */
    pthread_barrier_wait(&b->barrier);
    if (fails && b->forget_a_peer) {
        peers[s->rank ? 0 : 1] = NULL;
        return 0;
    }
    return own ? 0 : -12;
}

static int board_heap_free(void *user, void *own)
{
    seat *s = user;
    board *b = s->b;
    bool fails = fails_now(s, HEAP_FREE);
    CHECK(own == b->heap[s->rank]);
    __atomic_add_fetch(&b->live_heaps, -1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&b->frees, 1, __ATOMIC_RELAXED);
    free(own);
    return fails ? 3 : 0;
}

static void run_board(board *b, int32_t ranks, const mok_config *wish, void (*body)(ranks_env *), void *user)
{
    seat seats[MAX_P];
    mok_group *groups[MAX_P];
    b->ranks = ranks;
    pthread_barrier_init(&b->barrier, NULL, (unsigned)ranks);
    for (int32_t r = 0; r < ranks; r++) {
        mok_provider p = MOK_INIT(mok_provider);
        seats[r] = (seat){b, r, {0}};
        p.user = &seats[r];
        p.all_gather = board_all_gather;
        p.heap_alloc = board_heap_alloc;
        p.heap_free = board_heap_free;
        REQUIRE(mok_group_create(&p, r, ranks, &groups[r]) == MOK_OK);
        memset(&p, 0xff, sizeof p); /* the group keeps its own copy */
        CHECK_EQ(mok_group_rank(groups[r]), r);
        CHECK_EQ(mok_group_size(groups[r]), ranks);
    }
    ranks_run_groups(ranks, groups, wish, body, user);
    for (int32_t r = 0; r < ranks; r++)
        mok_group_destroy(groups[r]);
    pthread_barrier_destroy(&b->barrier);
    CHECK_EQ(b->live_heaps, 0);
    CHECK_EQ(b->frees, b->allocs);
}

typedef struct layer { layer_problem p; layer_result want, got; } layer;

static void pass(ranks_env *e)
{
    layer *l = e->user;
    ranks_part part = ranks_part_of(e, TOKENS, NULL);
    void *schedule = ranks_schedule_block(e), *context = ranks_context_block(e);
    mok_schedule_args a = ranks_schedule_args(&l->p, part, schedule);
    mok_forward_args f = ranks_forward_args(e, &l->p, part, schedule, context, &l->got);
    mok_backward_args b = ranks_backward_args(e, &l->p, part, schedule, context, &l->got);
    for (int i = 0; i < 2; i++) {
        RANKS_OK(mok_schedule(e->w, &a, NULL));
        RANKS_OK(mok_forward(e->w, &f, NULL));
        RANKS_OK(mok_backward(e->w, &b, NULL));
    }
    free(schedule);
    free(context);
}

TEST(a_callers_provider_gives_the_same_bits)
{
    layer l;
    mok_config c = good_config();
    layer_options alone = {.ranks = 1}, most = {.ranks = MAX_P};
    char error[512];
    if (!layer_make(&l.p, &c, TOKENS, LAYER_UNIFORM, 0.1, 8) || !layer_result_make(&l.want, &l.p, &alone))
        exit(1);
    CHECK_EQ(layer_run(&l.p, &alone, &l.want, error), MOK_OK);
    for (int32_t ranks = 1; ranks <= MAX_P; ranks++) {
        board b = {.fail_at = 0};
        c.max_tokens = TOKENS;
        if (!layer_result_make(&l.got, &l.p, &most))
            exit(1);
        run_board(&b, ranks, &c, pass, &l);
        ranks_same_results("a provider's group", &l.p, &l.got, &l.want, true);
        CHECK_EQ(b.allocs, ranks);
        CHECK(ranks == 1 || b.gathers > 0);
        layer_result_free(&l.got);
    }
    layer_result_free(&l.want);
    layer_free(&l.p);
}

/* --- failing functions -------------------------------------------------------------------------------------------------------------- */
typedef struct attempt { const char *words; int32_t fail_rank; int failures; } attempt;

static void fail_once(ranks_env *e)
{
    attempt *a = e->user;
    mok_config c = good_config();
    mok_workspace *w = NULL;
    mok_status status = mok_workspace_create(e->group, &c, &w);
    if (status != MOK_OK) {
        CHECK_EQ(status, MOK_E_ENV);
        CHECK(w == NULL);
        CHECK_STR(mok_last_error(), a->words);
        __atomic_add_fetch(&a->failures, 1, __ATOMIC_RELAXED);
        RANKS_OK(mok_workspace_create(e->group, &c, &w)); /* the provider has recovered */
    }
    mok_workspace_destroy(w);
}

TEST(all_gather_fails_on_all_ranks)
{
    for (int at = 1; at <= 3; at++) { /* each meeting of a creation */
        board b = {.failing = ALL_GATHER, .fail_at = at, .fail_rank = -1};
        attempt a = {"the provider's all_gather of ", -1, 0};
        run_board(&b, 3, NULL, fail_once, &a);
        CHECK_EQ(a.failures, 3);
    }
    board b = {.failing = ALL_GATHER, .fail_at = 1, .fail_rank = -1};
    attempt a = {" with 7", -1, 0};
    run_board(&b, 2, NULL, fail_once, &a);
    CHECK_EQ(a.failures, 2);
}

TEST(heap_alloc_fails_on_all_ranks)
{
    for (int32_t ranks = 1; ranks <= 3; ranks++) {
        board b = {.failing = HEAP_ALLOC, .fail_at = 1, .fail_rank = -1};
        attempt a = {"the provider's heap_alloc of ", -1, 0};
        run_board(&b, ranks, NULL, fail_once, &a);
        CHECK_EQ(a.failures, ranks);
    }
    board b = {.failing = HEAP_ALLOC, .fail_at = 1, .fail_rank = -1};
    attempt a = {"with -12", -1, 0};
    run_board(&b, 2, NULL, fail_once, &a);
}

/* One rank has no memory: all hear of it, nobody waits, and what the others got is given back. */
TEST(heap_alloc_fails_on_one_rank)
{
    for (int32_t who = 0; who < 3; who++) {
        board b = {.failing = HEAP_ALLOC, .fail_at = 1, .fail_rank = who};
        char words[64];
        snprintf(words, sizeof words, "failed on rank %d with -12", who);
        attempt a = {words, who, 0};
        run_board(&b, 3, NULL, fail_once, &a);
        CHECK_EQ(a.failures, 3);
    }
}

TEST(heap_alloc_forgets_a_peer)
{
    board b = {.failing = HEAP_ALLOC, .fail_at = 1, .fail_rank = -1, .forget_a_peer = true};
    attempt a = {"heap_alloc gave rank ", -1, 0};
    run_board(&b, 3, NULL, fail_once, &a);
    CHECK_EQ(a.failures, 3);
    board one = {.failing = HEAP_ALLOC, .fail_at = 1, .fail_rank = 2, .forget_a_peer = true};
    attempt of_one = {"heap_alloc gave rank 2 no pointer to rank 0", 2, 0};
    run_board(&one, 3, NULL, fail_once, &of_one);
    CHECK_EQ(of_one.failures, 3);
}

TEST(heap_free_or_the_last_gather_fails)
{
    /* Destroying returns nothing: it must neither crash nor leak. */
    board b = {.failing = HEAP_FREE, .fail_at = 1, .fail_rank = -1};
    attempt a = {"", -1, 0};
    run_board(&b, 3, NULL, fail_once, &a);
    CHECK_EQ(a.failures, 0);
    board last = {.failing = ALL_GATHER, .fail_at = 4, .fail_rank = -1};
    run_board(&last, 3, NULL, fail_once, &a);
    CHECK_EQ(a.failures, 0);
}

int main(int argc, char **argv)
{
    return test_main(argc, argv);
}
