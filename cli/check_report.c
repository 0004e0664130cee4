/* mok check: what failed, and the tables for people. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "shape.h"
#include "term.h"

enum { FEWEST_ROTATIONS = 3 };

/* --------------------------------------------------------------------------------------------------------- verdict -- */

__attribute__((format(printf, 2, 3))) static void failed(check_report *r, const char *format, ...)
{
    if (r->num_failures < CHECK_MAX_SENTENCES) {
        va_list args;
        va_start(args, format);
        vsnprintf(r->sentences[r->num_failures], sizeof r->sentences[0], format, args);
        va_end(args);
    }
    r->num_failures++;
}

void check_add_stats(mok_stats *to, const mok_stats *from)
{
    to->rows += from->rows;
    to->rows_pulled += from->rows_pulled;
    to->rows_pulled_peer += from->rows_pulled_peer;
    to->rows_copied += from->rows_copied;
    to->rows_replayed += from->rows_replayed;
    to->rows_padding += from->rows_padding;
    to->ring_rotations += from->ring_rotations;
    to->wgrad_continued += from->wgrad_continued;
    to->bytes_pulled_peer += from->bytes_pulled_peer;
    to->bytes_pushed_peer += from->bytes_pushed_peer;
}

mok_stats check_total(const check_routing *r, const char *variant, int64_t *rotations)
{
    mok_stats total = {0};
    for (int64_t i = 0; i < r->num_runs; i++) {
        if (variant && r->runs[i].variant != variant)
            continue;
        check_add_stats(&total, &r->runs[i].total);
        if (rotations && r->runs[i].small_ring && r->runs[i].rotations > *rotations)
            *rotations = r->runs[i].rotations;
    }
    return total;
}

static void judge_routing(check_report *report, const check_routing *r)
{
    for (int64_t i = 0; i < r->num_runs; i++) {
        const check_run *run = &r->runs[i];
        if (*run->difference)
            failed(report, "%s routing, %d ranks, %s: %s", r->name, run->ranks, run->variant, run->difference);
        if (*run->plan_difference)
            failed(report, "%s routing, %d ranks, %s: %s", r->name, run->ranks, run->variant, run->plan_difference);
    }
    for (int i = 0; i < CHECK_NUM_OUTPUTS; i++)
        if (!check_error_ok(r, i) && report->settings.cfg.dtype == MOK_MXFP8)
            failed(report, "%s routing: %s is off by %.3g of its size (limit %g), and by %.3g at most (limit %g)", r->name, check_output_names[i], r->error[i],
                   CHECK_MX_ERROR, r->largest[i], CHECK_MX_LARGEST);
        else if (!check_error_ok(r, i))
            failed(report, "%s routing: the error of %s is %.3g, more than twice the %.3g of a plain bf16 chain", r->name, check_output_names[i], r->error[i],
                   r->chain_error[i]);
}

/* Equal bits show something only if the machinery that could change them was at work. */
static void judge_worth(check_report *report)
{
    const check_settings *s = &report->settings;
    int64_t rotations = 0, most_ranks = 1;
    mok_stats all = check_total(&report->routings[0], NULL, NULL), skewed = check_total(&report->routings[1], NULL, &rotations);
    check_add_stats(&all, &skewed);
    for (size_t i = 0; i < s->ranks.count; i++)
        most_ranks = s->ranks.values[i] > most_ranks ? s->ranks.values[i] : most_ranks;
    if (rotations < FEWEST_ROTATIONS)
        failed(report, "this proves nothing: with skewed routing the smallest ring turned only %lld times on any rank, not %d: raise --tokens or --topk",
               (long long)rotations, FEWEST_ROTATIONS);
    if (!skewed.wgrad_continued && !report->settings.forward_only)
        failed(report, "this proves nothing: with skewed routing no weight gradient was cut and continued: raise --tokens or --topk");
    if (!all.rows_replayed && !report->settings.forward_only)
        failed(report, "this proves nothing: no row was replayed: raise --tokens");
    if (!all.rows_copied && s->cfg.topk > 1 && most_ranks > 1) /* a rank alone copies only what a token sends to one expert twice */
        failed(report, "this proves nothing: no row was copied: raise --topk or --tokens, or choose fewer ranks, but two or more");
    if (!all.rows_pulled_peer && most_ranks > 1)
        failed(report, "this proves nothing: no row came from another rank: raise --tokens");
}

void check_judge(check_report *report)
{
    for (int i = 0; i < CHECK_ROUTINGS; i++)
        judge_routing(report, &report->routings[i]);
    judge_worth(report);
}

/* ----------------------------------------------------------------------------------------------------------- text -- */

bool check_has_output(const check_report *r, int output)
{
    const mok_config *c = &r->settings.cfg;
    if (r->settings.forward_only && output != CHECK_out)
        return false;
    return output < CHECK_NUM_SAME || (c->shared_intermediate && (output != CHECK_dshared_output_gate || c->shared_gate));
}

/* One line per variant, all numbers of ranks together. */
static void print_runs(const check_report *report, const check_routing *r)
{
    term_table t;
    int64_t per_rank = r->num_runs / (int64_t)report->settings.ranks.count;
    printf("\n%s routing: %s rows, %s of them for the busiest expert; turns of the ring, rows and bytes of all runs of a variant\n\n", r->name, term_count(r->rows).text, term_count(r->busiest).text);
    term_table_start(&t, "llrrrrrrrr", (const char *[]){"variant", "saved", "turns", "pulled", "of peers", "copied", "replayed", "continued", "link", "bits"});
    for (int64_t i = 0; i < per_rank; i++) {
        mok_stats total = check_total(r, r->runs[i].variant, NULL);
        bool same = true;
        for (int64_t j = 0; j < r->num_runs; j++)
            same &= r->runs[j].variant != r->runs[i].variant || !r->runs[j].differing;
        term_table_cell(&t, "%s", r->runs[i].variant);
        term_table_cell(&t, "%s", r->runs[i].save);
        term_table_cell(&t, "%s", term_count(total.ring_rotations).text);
        term_table_cell(&t, "%s", term_count(total.rows_pulled).text);
        term_table_cell(&t, "%s", term_count(total.rows_pulled_peer).text);
        term_table_cell(&t, "%s", term_count(total.rows_copied).text);
        term_table_cell(&t, "%s", term_count(total.rows_replayed).text);
        term_table_cell(&t, "%s", term_count(total.wgrad_continued).text);
        term_table_cell(&t, "%s", term_bytes((double)(total.bytes_pulled_peer + total.bytes_pushed_peer)).text);
        term_table_cell(&t, "%s", same ? "same" : "DIFFER");
    }
    term_table_print(&t, stdout);
}

static void print_errors(const check_report *report)
{
    term_table t;
    bool mx = report->settings.cfg.dtype == MOK_MXFP8;
    const char *beside = mx ? "largest" : "chain";
    if (mx)
        printf("\nagainst float64 without quantisation: sum of differences over sum of sizes (limit %g), and the largest difference (limit %g;\n"
               "of gradients as if dout were randn / sqrt(hidden))\n\n", CHECK_MX_ERROR, CHECK_MX_LARGEST);
    else
        printf("\nrelative error against float64, beside that of a plain bf16 chain (limit: twice as much)\n\n");
    term_table_start(&t, "lrrrrl", (const char *[]){"output", "uniform", beside, "skewed", beside, ""});
    for (int i = 0; i < CHECK_NUM_OUTPUTS; i++) {
        if (!check_has_output(report, i))
            continue;
        bool ok = true;
        term_table_cell(&t, "%s", check_output_names[i]);
        for (int k = 0; k < CHECK_ROUTINGS; k++) {
            term_table_cell(&t, "%.2e", report->routings[k].error[i]);
            term_table_cell(&t, "%.2e", mx ? report->routings[k].largest[i] : report->routings[k].chain_error[i]);
            ok &= check_error_ok(&report->routings[k], i);
        }
        term_table_cell(&t, "%s", ok ? "ok" : "TOO LARGE");
    }
    term_table_print(&t, stdout);
}

void check_print_text(const check_report *r)
{
    const check_settings *s = &r->settings;
    char shape[192];
    int64_t rotations = 0, runs = 0;
    printf("%s; %s tokens over", shape_describe(&s->cfg, shape), term_count(s->tokens).text);
    for (size_t i = 0; i < s->ranks.count; i++)
        printf("%s%lld", i ? ", " : " ", (long long)s->ranks.values[i]);
    printf(" ranks; %g %% of the routes dropped\nseed %llu (--seed %llu repeats this run)\n", 100 * s->dropped, (unsigned long long)s->seed,
           (unsigned long long)s->seed);
    for (int k = 0; k < CHECK_ROUTINGS; k++) {
        print_runs(r, &r->routings[k]);
        runs += r->routings[k].num_runs;
    }
    print_errors(r);
    (void)check_total(&r->routings[1], NULL, &rotations);
    printf("\n");
    for (int64_t i = 0; i < r->num_failures && i < CHECK_MAX_SENTENCES; i++)
        printf("FAILED: %s\n", r->sentences[i]);
    if (r->num_failures > CHECK_MAX_SENTENCES)
        printf("FAILED: and %lld more\n", (long long)(r->num_failures - CHECK_MAX_SENTENCES));
    if (!r->num_failures)
        printf("passed: %lld runs, the same bits in all; rows and bytes as the schedules say; the smallest ring turned %lld times on one rank; %s\n",
               (long long)runs, (long long)rotations, term_seconds(r->seconds).text);
}
