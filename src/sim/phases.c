/* Strategies that run kernel after kernel, from the same row tables: every phase lasts as long as its slowest rank needs, because the next
 * one is a collective. Nothing overlaps. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "sim/sim.h"

typedef struct loads {
    double out_max, in_max;    /* rows that leave or reach the busiest rank */
    double rows_max, rows_mean, padded_max; /* padded: to whole tiles of 128 rows */
} loads;

/* deduplicated: a token goes once to each rank, whatever number of its experts live there. */
static bool count_loads(const sim_case *c, const sim_tables *t, bool deduplicated, loads *l)
{
    *l = (loads){0};
    double *out = calloc((size_t)t->num_ranks, sizeof *out);
    int32_t *last = calloc((size_t)mk_max(t->num_tokens, 1), sizeof *last);
    for (int32_t r = 0; r < t->num_ranks && out && last; r++) {
        const sim_rank_table *own = &t->ranks[r];
        double in = 0;
        for (int64_t i = 0; i < (int64_t)own->head.num_tiles * MK_ROW_TILE; i++) {
            const mk_row *row = &own->table.rows[i];
            if (row->src_rank < 0 || row->src_rank == r)
                continue;
            int64_t g = t->token_first[row->src_rank] + row->src_slot / c->dims.topk;
            if (deduplicated && last[g] == r + 1)
                continue;
            last[g] = r + 1;
            in++;
            out[row->src_rank]++;
        }
        l->in_max = fmax(l->in_max, in);
        l->rows_max = fmax(l->rows_max, (double)own->head.num_rows);
        l->padded_max = fmax(l->padded_max, (double)own->head.num_tiles * MK_ROW_TILE);
        l->rows_mean += (double)own->head.num_rows / t->num_ranks;
    }
    for (int32_t r = 0; r < t->num_ranks && out; r++)
        l->out_max = fmax(l->out_max, out[r]);
    bool ok = out && last;
    free(out);
    free(last);
    return ok;
}

/* Grouped GEMM: the products of `rows`, or its weights' and rows' bytes from memory if those take longer. */
static double gemm_seconds(const sim_case *c, double rows, double n, double k, double matrices)
{
    const sim_profile *p = &c->profile;
    double rate = sim_rate(c) * 1e12 * p->grouped_factor * k / (k + p->grouped_half_k), element = c->mxfp8 ? 33.0 / 32 : 2;
    double products = 2 * rows * n * k / rate, bytes = matrices * n * k * element + rows * (k * element + n * 2);
    return fmax(products, bytes / (p->hbm_gbps * 1e9)) + p->elementwise_us * 1e-6;
}

/* Grouped weight gradients: dWg with dWu, and dWd, each one kernel over the experts. K is an expert's share of the rows; results are bf16. */
static double wgrad_seconds(const sim_case *c, double rows)
{
    const sim_profile *p = &c->profile;
    double experts = fmax(1, (double)c->dims.experts_count), elements = (double)c->dims.hidden * (double)c->dims.intermediate, k = rows / experts;
    double rate = sim_rate(c) * 1e12 * p->grouped_factor * k / (k + p->grouped_half_k);
    return fmax(2 * 3 * elements * rows / rate, 3 * elements * experts * 2 / (p->hbm_gbps * 1e9)) + 2 * p->elementwise_us * 1e-6;
}

static double elementwise_seconds(const sim_profile *p, double bytes) { return bytes / (p->elementwise_gbps * 1e9) + p->elementwise_us * 1e-6; }

bool sim_phases(const sim_case *c, const sim_tables *t, sim_result *o)
{
    const sim_profile *p = &c->profile;
    bool deepep = sim_strategies[c->strategy].phases == 2, backward = c->pass == MK_PASS_BACKWARD;
    double h = (double)c->dims.hidden, width = (double)c->dims.intermediate, x_bytes = sim_row_bytes(c), y_bytes = 2 * h, tokens = (double)c->tokens;
    loads l;
    if (!count_loads(c, t, deepep, &l))
        return false;
    double gbps = (deepep ? p->deepep_gbps : p->nccl_gbps) * (t->num_ranks > 2 ? p->switch_factor : 1) * 1e9;
    double fixed = (deepep ? p->deepep_us : p->nccl_us + p->nccl_us_per_rank * t->num_ranks) * 1e-6, ports = fmax(l.in_max, l.out_max);
    if (t->num_ranks == 1 || c->free_link)
        fixed = ports = 0;
    memset(o, 0, sizeof *o);
    sim_series_start(&o->link_out, 1e-6);
    sim_series_start(&o->link_in, 1e-6);
    sim_series_start(&o->ring, 1e-6);
    /* Forward: counts to the CPU, sort and gather, all-to-all, gather by expert, two GEMMs with SwiGLU between, back, weighted sum. The backward
     * runs the same road the other way with twice the products; its routing is known. */
    double gather = elementwise_seconds(p, 2 * (deepep ? ports : tokens * (double)c->dims.topk) * x_bytes);
    double by_expert = elementwise_seconds(p, 2 * l.rows_max * x_bytes), back = elementwise_seconds(p, 2 * l.rows_max * y_bytes);
    double sum = elementwise_seconds(p, (double)c->dims.topk * tokens * y_bytes + tokens * y_bytes);
    double swiglu = elementwise_seconds(p, l.rows_max * width * 2 * (backward ? 6 : 3));
    double quantise = c->mxfp8 ? elementwise_seconds(p, l.rows_max * width * 3) : 0;
    double experts = (double)c->dims.experts_count;
    double forward = gemm_seconds(c, l.padded_max, 2 * width, h, experts) + gemm_seconds(c, l.padded_max, h, width, experts);
    double backward_gemms = gemm_seconds(c, l.padded_max, width, h, experts) + gemm_seconds(c, l.padded_max, h, 2 * width, experts) + wgrad_seconds(c, l.rows_max);
    double there = fixed + ports * x_bytes / gbps, home = fixed + ports * y_bytes / gbps;
    o->before = (backward ? 0 : p->cpu_sync_us * 1e-6) + gather + there + by_expert;
    o->kernel = (backward ? backward_gemms : forward) + swiglu + quantise;
    o->after = back + home + sum;
    o->seconds = o->before + o->kernel + o->after;
    o->rows_max = l.rows_max;
    o->rows_mean = l.rows_mean;
    o->kernel_mean = o->kernel;
    o->link_bytes_max = ports * (x_bytes + y_bytes);
    o->flops = (backward ? 12 : 6) * h * width * l.rows_mean * t->num_ranks;
    if (c->dims.shared_intermediate) {
        double dense = 2 * gemm_seconds(c, tokens, (double)c->dims.shared_intermediate * 1.5, h, 1) * (backward ? 2 : 1);
        o->kernel += dense;
        o->seconds += dense;
        o->flops += (backward ? 12 : 6) * h * tokens * t->num_ranks * (double)c->dims.shared_intermediate;
    }    return true;
}
