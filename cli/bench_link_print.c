/* mok bench --only link: the tables and the JSON. */
#define MOK_EXPERIMENTAL
#include <math.h>
#include <stdio.h>

#include "bench_link.h"
#include "term.h"

static const char *const names[] = {
#define NAME(name, bits, ceiling) #name,
    BENCH_LINK_WORKS(NAME)
#undef NAME
};

static double rate(const bench_link_time *t) { return t->bytes / t->p50; }

/* What the news of arrival costs on top of the rows themselves. */
static double signal_seconds(const bench_link_case *c, int told, int plain) { return c->times[told].p50 - c->times[plain].p50; }

static double mx_bytes_of_bf16(const bench_link_case *c) { return c->times[BENCH_LINK_pull_mx].bytes / c->times[BENCH_LINK_pull].bytes; }

void bench_link_json(json_writer *w, const bench_link *l)
{
    json_begin_object(w, "link");
    json_string(w, "ranks_are", l->settings.processes ? "processes" : "threads");
    json_bool(w, "one_gpu", l->one_gpu);
    json_int(w, "blocks", l->settings.blocks);
    json_begin_array(w, "cases");
    for (int32_t i = 0; i < l->num_cases; i++) {
        const bench_link_case *c = &l->cases[i];
        json_begin_object(w, NULL);
        json_string(w, "routing", c->routing);
        json_int(w, "row_bytes", c->row_bytes);
        json_string(w, "rows_of", c->row_of);
        json_int(w, "rows", c->rows);
        for (int work = 0; work < BENCH_LINK_NUM_WORKS; work++) {
            const bench_link_time *t = &c->times[work];
            json_begin_object(w, names[work]);
            json_double(w, "p50_ms", 1e3 * t->p50);
            json_double(w, "p99_ms", 1e3 * t->p99);
            if (t->bytes > 0) {
                json_double(w, "bytes", t->bytes);
                json_double(w, "gb_per_second", 1e-9 * rate(t));
            }
            if (!isnan(t->share))
                json_double(w, work == BENCH_LINK_pull_mx ? "times_as_fast_as_bf16" : "share_of_ceiling", t->share);
            json_end_object(w);
        }
        json_double(w, "mx_bytes_of_bf16", mx_bytes_of_bf16(c));
        json_double(w, "pull_signals_us", 1e6 * signal_seconds(c, BENCH_LINK_pull_told, BENCH_LINK_plain_pull));
        json_double(w, "push_signals_us", 1e6 * signal_seconds(c, BENCH_LINK_push_told, BENCH_LINK_plain_push));
        json_end_object(w);
    }
    json_end_array(w);
    json_end_object(w);
}

static void print_rates(const bench_link *l)
{
    static const struct { const char *what; int work, ceiling; } rows[] = {
        {"pull", BENCH_LINK_pull, BENCH_LINK_plain_pull}, {"push", BENCH_LINK_push, BENCH_LINK_plain_push}, {"both", BENCH_LINK_both, BENCH_LINK_plain_both}};
    term_table t;
    term_table_start(&t, "rlllrrrrrr", (const char *[]){"row", "", "routing", "what", "bytes", "p50", "p99", "rate", "at best", "share"});
    for (int32_t i = 0; i < l->num_cases; i++)
        for (size_t j = 0; j < sizeof rows / sizeof *rows; j++) {
            const bench_link_case *c = &l->cases[i];
            const bench_link_time *ours = &c->times[rows[j].work], *best = &c->times[rows[j].ceiling];
            bool again = j || (i && c->row_bytes == c[-1].row_bytes);
            term_table_cell(&t, again ? "" : "%lld", (long long)c->row_bytes);
            term_table_cell(&t, "%s", again ? "" : c->row_of);
            term_table_cell(&t, "%s", j ? "" : c->routing);
            term_table_cell(&t, "%s", rows[j].what);
            term_table_cell(&t, "%s", term_si(ours->bytes, "B").text);
            term_table_cell(&t, "%s", term_seconds(ours->p50).text);
            term_table_cell(&t, "%s", term_seconds(ours->p99).text);
            term_table_cell(&t, "%s", term_si(rate(ours), "B/s").text);
            term_table_cell(&t, "%s", term_si(rate(best), "B/s").text);
            term_table_cell(&t, "%.3f", ours->share);
        }
    term_table_print(&t, stdout);
}

static void print_mx(const bench_link *l)
{
    term_table t;
    term_table_start(&t, "rlrrrrrr", (const char *[]){"row", "routing", "bytes", "of BF16's", "p50", "p99", "rate", "times as fast"});
    for (int32_t i = 0; i < l->num_cases; i++) {
        const bench_link_case *c = &l->cases[i];
        const bench_link_time *mx = &c->times[BENCH_LINK_pull_mx];
        term_table_cell(&t, "%lld", (long long)c->row_bytes);
        term_table_cell(&t, "%s", c->routing);
        term_table_cell(&t, "%s", term_si(mx->bytes, "B").text);
        term_table_cell(&t, "%.3f", mx_bytes_of_bf16(c));
        term_table_cell(&t, "%s", term_seconds(mx->p50).text);
        term_table_cell(&t, "%s", term_seconds(mx->p99).text);
        term_table_cell(&t, "%s", term_si(rate(mx), "B/s").text);
        term_table_cell(&t, "%.3f", mx->share);
    }
    term_table_print(&t, stdout);
}

static void print_signals(const bench_link *l)
{
    term_table t;
    term_table_start(&t, "rlrrrrr", (const char *[]){"row", "routing", "rows", "pull: more", "alone", "push: more", "alone"});
    for (int32_t i = 0; i < l->num_cases; i++) {
        const bench_link_case *c = &l->cases[i];
        term_table_cell(&t, "%lld", (long long)c->row_bytes);
        term_table_cell(&t, "%s", c->routing);
        term_table_cell(&t, "%s", term_count(c->rows).text);
        term_table_cell(&t, "%.1f us", 1e6 * signal_seconds(c, BENCH_LINK_pull_told, BENCH_LINK_plain_pull));
        term_table_cell(&t, "%.1f us", 1e6 * c->times[BENCH_LINK_pull_news].p50);
        term_table_cell(&t, "%.1f us", 1e6 * signal_seconds(c, BENCH_LINK_push_told, BENCH_LINK_plain_push));
        term_table_cell(&t, "%.1f us", 1e6 * c->times[BENCH_LINK_push_news].p50);
    }
    term_table_print(&t, stdout);
}

void bench_link_text(const bench_link *l)
{
    const bench_link_settings *s = &l->settings;
    printf("\nlink: %d rank%s, %s%s; %s rows of each; median of %s rounds in alternation. Everything that arrived was checked.\n", s->ranks, s->ranks == 1 ? "" : "s",
           s->processes ? "processes" : "threads", l->one_gpu ? " on one GPU, so nothing crosses a link" : " with a GPU each", term_count(s->tokens).text, term_count(s->repeat).text);
    printf("Bytes and rates are of one direction of the busiest rank; a round takes as long as its slowest rank. At best: whole rows by as many bulk copies as fit, in\n"
           "the same rounds; share: the median of the rounds' ratios.\n\n");
    print_rates(l);
    printf("\nTokens as wide in MXFP8, pulled by the code of s1_dispatch: bytes as it counted them; times as fast: the median of the rounds' ratios to pull.\n\n");
    print_mx(l);
    printf("\nSignals that rows have arrived: what they add to plain copies, and alone. Pull: counts in the puller's own memory; push: a flag for every row, at its token's rank.\n\n");
    print_signals(l);
}
