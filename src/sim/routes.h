/* Routings to simulate: expert ids [N, K] of all ranks' tokens. */
#ifndef MK_SIM_ROUTES_H
#define MK_SIM_ROUTES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum sim_routing_kind {
    SIM_BALANCED,     /* every expert gets the same number of rows, as nearly as numbers allow */
    SIM_UNIFORM,      /* K different experts, all alike */
    SIM_REPLACEMENT,  /* K draws, all alike: the same expert may come twice (what bench/ does) */
    SIM_ZIPF,         /* K different experts; the i-th most liked has weight i^-skew */
    SIM_HOT           /* one expert is in a share `skew` of the tokens, the rest uniform */
} sim_routing_kind;

typedef struct sim_routing {
    sim_routing_kind kind;
    double skew;
    uint64_t seed;
} sim_routing;

/* ids: [num_tokens, topk], written. topk <= num_experts. False: out of memory. */
bool sim_make_routes(const sim_routing *r, int64_t num_tokens, int64_t topk, int64_t num_experts, int32_t *ids);
/* "balanced", "uniform", "replacement", "zipf:1.2", "hot:0.5". False and one sentence. */
bool sim_parse_routing(const char *text, sim_routing *r, char *error, size_t error_size);

/* splitmix64 */
uint64_t sim_random(uint64_t *state);

#endif
