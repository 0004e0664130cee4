/* From what the caller wrote (mok_config) to the numbers that everything else uses (mk_dims). */
#ifndef MK_LAYOUT_CONFIG_H
#define MK_LAYOUT_CONFIG_H

#include "layout/dims.h"
#include "layout/memory.h"
#include "mok.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The machine, as far as the choice of a minibatch and memory depend on it. */
typedef struct mk_machine {
    int32_t num_sms, tile_rows, tile_cols;
    bool scaled; /* its tensor cores multiply MXFP8 as it is: nothing is widened but operands of weight gradients */
} mk_machine;

/* No Hopper has more multiprocessors; every whole Blackwell has. */
enum { MK_HOPPER_SMS = 144 };

/* The backend's machine: what mok_plan_query takes when its caller says 0. num_sms 0 stands for a CPU. */
mk_machine mk_default_machine(mok_backend_id backend);

/* Copies the caller's prefix of a struct over zeros. `have` is the library's size. Refuses a header that no library wrote and
 * extra bytes that are not zero. */
mok_status mk_read_struct(const char *what, const void *from, void *to, uint32_t have);
/* Copies the library's struct into the caller's, which may be shorter or longer; its header stays. */
mok_status mk_write_struct(const char *what, const void *from, uint32_t have, void *to);

/* How long to wait for another rank if nobody says otherwise: ten minutes. */
enum { MK_TIMEOUT_MS = 600000 };

/* What a caller's timeout_ms, called `name` in sentences, stands for: itself, or with 0 MOK_TIMEOUT_MS of the environment or else
 * MK_TIMEOUT_MS. A wrong one is refused, with *ms = MK_TIMEOUT_MS for who must tell others of it. */
mok_status mk_timeout(const char *name, int64_t wish, int64_t *ms);

/* Checks `cfg` (already read by mk_read_struct), replaces every "choose for me", and derives the dims of `rank`. */
mok_status mk_resolve(mok_config *cfg, int32_t num_ranks, int32_t rank, mk_machine machine, mk_dims *d);

/* Rows that fill the machine's tiles twice in the narrowest GEMM of a pass, whose N is *narrowest. */
double mk_two_wave_rows(const mok_config *cfg, mk_machine machine, bool backward, int64_t *narrowest);

/* Everything of mok_plan but its header. */
void mk_fill_plan(const mok_config *cfg, const mk_dims *d, const mk_memory *memory, mk_machine machine, mok_plan *plan);

/* Two resolved configurations: NULL if ranks with these may form a workspace, else the first field that differs, with its values. */
const char *mk_config_difference(const mok_config *a, const mok_config *b, double *value_a, double *value_b);

/* A number that is equal exactly if the fields that must agree are (as far as 64 bits can tell). */
uint64_t mk_config_fingerprint(const mok_config *cfg, int32_t num_ranks);

#ifdef __cplusplus
}
#endif

#endif
