/* mok check: the outputs of a result, the comparison of their bits, and of what was counted with what the schedules say. */
#include <stdio.h>
#include <string.h>

#include "check.h"

const char *const check_output_names[CHECK_NUM_OUTPUTS] = {
#define NAME(name) #name,
    CHECK_SAME_LIST(NAME) CHECK_SHARED_LIST(NAME)
#undef NAME
};

check_array check_output(const layer_problem *p, const layer_result *r, int output)
{
    const mok_config *c = &p->cfg;
    int64_t tokens = p->tokens * c->hidden, routed = c->num_experts * c->intermediate * c->hidden;
    int64_t shared = r->ranks * c->shared_intermediate * c->hidden;
    if (r->forward_only && output != CHECK_out)
        return (check_array){r->out, 0, 2};
    switch (output) {
    case CHECK_out: return (check_array){r->out, tokens, 2};
    case CHECK_dx: return (check_array){r->dx, tokens, 2};
    case CHECK_drouter_weights: return (check_array){r->drouter_weights, p->tokens * c->topk, 4};
    case CHECK_dgate: return (check_array){r->dgate, routed, r->grad_bytes};
    case CHECK_dup: return (check_array){r->dup, routed, r->grad_bytes};
    case CHECK_ddown: return (check_array){r->ddown, routed, r->grad_bytes};
    case CHECK_dshared_gate: return (check_array){r->dshared_gate, shared, r->grad_bytes};
    case CHECK_dshared_up: return (check_array){r->dshared_up, shared, r->grad_bytes};
    case CHECK_dshared_down: return (check_array){r->dshared_down, shared, r->grad_bytes};
    default: return (check_array){r->dshared_output_gate, c->shared_gate ? r->ranks * c->hidden : 0, r->grad_bytes};
    }
}

/* ----------------------------------------------------------------------------------------------------------- bits -- */

static void compare_output(check_run *run, int output, check_array is, check_array should_be)
{
    int64_t different = 0, first = -1;
    if (!memcmp(is.data, should_be.data, (size_t)(is.count * is.size)))
        return;
    const char *a = is.data, *b = should_be.data;
    for (int64_t i = 0; i < is.count; i++)
        if (memcmp(a + i * is.size, b + i * is.size, (size_t)is.size)) {
            first = first < 0 ? i : first;
            different++;
        }
    if (!run->differing) {
        uint32_t x = 0, y = 0;
        memcpy(&x, a + first * is.size, (size_t)is.size);
        memcpy(&y, b + first * is.size, (size_t)is.size);
        snprintf(run->difference, sizeof run->difference, "%lld of %lld elements of %s differ, first [%lld]: 0x%0*x instead of 0x%0*x", (long long)different,
                 (long long)is.count, check_output_names[output], (long long)first, (int)(2 * is.size), x, (int)(2 * is.size), y);
    }
    run->differing |= 1u << output;
}

/* `first`: of all runs; `first_here`: of those with as many ranks and the same split, for the shared expert. */
static void compare_bits(const layer_problem *p, check_run *run, const layer_result *r, const layer_result *first, const layer_result *first_here)
{
    for (int i = 0; i < CHECK_NUM_OUTPUTS; i++) {
        const layer_result *with = i < CHECK_NUM_SAME ? first : first_here;
        if (with)
            compare_output(run, i, check_output(p, r, i), check_output(p, with, i));
    }
}

/* --------------------------------------------------------------------------------------------------------- counts -- */

#define COUNT_LIST(X)                                                                                                   \
    X(rows) X(rows_pulled) X(rows_pulled_peer) X(rows_copied) X(rows_replayed) X(rows_padding) X(ring_rotations)        \
    X(wgrad_continued) X(bytes_pulled_peer) X(bytes_pushed_peer)

/* What a pass over `rows` of `table` rows adds. */
static void expect_pass(mok_stats *e, const mok_schedule_info *info, int64_t table, int64_t rows, int64_t copied, int64_t peer, int64_t ring)
{
    e->rows += rows;
    e->rows_copied += copied;
    e->rows_pulled += rows - copied;
    e->rows_pulled_peer += peer;
    e->rows_padding += info->table_rows - info->rows;
    e->ring_rotations += table / ring;
}

/* Counts are exact, except where the schedule does not say which rows lie below a save limit: there low and high enclose them. */
static void expect(const layer_options *o, const mok_schedule_info *info, const mok_config *cfg, mok_stats *low, mok_stats *high)
{
    int64_t saved = cfg->save_rows < info->table_rows ? cfg->save_rows : info->table_rows, ring = cfg->ring_rows;
    int64_t row = cfg->dtype == MOK_MXFP8 ? cfg->hidden + cfg->hidden / 32 : 2 * cfg->hidden;
    bool all_saved = saved == info->table_rows;
    expect_pass(high, info, info->table_rows, info->rows, info->rows_copied_fwd, info->rows_pulled_peer_fwd, ring);
    high->bytes_pulled_peer += info->bytes_pulled_peer_fwd;
    high->bytes_pushed_peer += info->bytes_pushed_peer_fwd;
    if (o->forward_only) {
        *low = *high;
        return;
    }
    high->bytes_pushed_peer += info->bytes_pushed_peer_bwd;
    high->wgrad_continued += info->wgrad_continued;
    for (int call = 0; call <= (int)o->two_call_backward; call++) {
        expect_pass(high, info, info->table_rows, info->rows, info->rows_copied_bwd, info->rows_pulled_peer_bwd, ring);
        high->bytes_pulled_peer += info->bytes_pulled_peer_bwd;
        high->rows_replayed += all_saved ? 0 : info->rows;
    }
    if (o->two_call_backward && all_saved) /* the call for dx needs no x then */
        high->bytes_pulled_peer -= info->rows_pulled_peer_bwd * row;
    *low = *high;
    if (saved && !all_saved)
        for (int call = 0; call <= (int)o->two_call_backward; call++)
            low->rows_replayed -= info->rows < saved ? info->rows : saved;
    if (!o->recompute)
        return;
    expect_pass(high, info, saved, info->rows, info->rows_copied_fwd, info->rows_pulled_peer_fwd, ring);
    high->bytes_pulled_peer += info->bytes_pulled_peer_fwd;
    if (all_saved)
        *low = *high;
    low->ring_rotations = high->ring_rotations;
}

static void compare_counts(const layer_options *o, const layer_result *r, check_run *run)
{
    int64_t repeat = o->repeat ? o->repeat : 1;
    for (int32_t rank = 0; rank < r->ranks; rank++) {
        mok_stats low = {0}, high = {0};
        const mok_stats *is = &r->stats[rank];
        expect(o, &r->info[rank], &r->config, &low, &high);
#define COMPARE(field)                                                                                                                    \
        if (!*run->plan_difference && (is->field < low.field * repeat || is->field > high.field * repeat))                                \
            snprintf(run->plan_difference, sizeof run->plan_difference, "rank %d counted %lld " #field ", but the schedule says %lld", rank,   \
                     (long long)is->field, (long long)(high.field * repeat));                                                             \
        run->total.field += is->field;
        COUNT_LIST(COMPARE)
#undef COMPARE
        run->rotations = is->ring_rotations > run->rotations ? is->ring_rotations : run->rotations;
    }
}

static void compare_loads(const layer_problem *p, const layer_result *r, check_run *run)
{
    for (int64_t e = 0; e < p->cfg.num_experts && !*run->plan_difference; e++) {
        int64_t routes = 0;
        for (int64_t i = 0; i < p->tokens * p->cfg.topk; i++)
            routes += p->expert_ids[i] == e;
        if (routes != r->tokens_per_expert[e])
            snprintf(run->plan_difference, sizeof run->plan_difference, "expert %lld got %lld routes, but tokens_per_expert_global says %lld", (long long)e,
                     (long long)routes, (long long)r->tokens_per_expert[e]);
    }
}

void check_compare(const layer_problem *p, const layer_options *o, const layer_result *r, const layer_result *first, const layer_result *first_here,
                   check_run *run)
{
    compare_bits(p, run, r, first, first_here);
    compare_counts(o, r, run);
    compare_loads(p, r, run);
}
