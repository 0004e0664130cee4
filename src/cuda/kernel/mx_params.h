/* What the host hands to the kernels of MXFP8 (src/cuda/kernel/mx.cu): as params.h.
 *
 *   kernel                    params                grid x block    what it does
 *   mok_mx_quantise_rows      mk_mx_rows_params     any x 256       bf16 [num_rows, cols] -> rows of mx/mx.h (tokens, as they travel)
 *   mok_mx_widen_rows         mk_mx_rows_params     any x 256       the way back
 *   mok_mx_quantise_matrix    mk_mx_matrix_params   any x 256       bf16 [count, rows, cols] -> e4m3 and scales, blocks along cols
 *   mok_mx_quantise_turned    mk_mx_matrix_params   any x 256, MK_MX_TURNED_SHARED bytes   -> e4m3 [count, cols, rows], blocks along rows
 *   mok_mx_widen_matrix       mk_mx_matrix_params   any x 256       e4m3 [count, rows, cols] and scales -> bf16, for chips without MX units
 *
 *   mok_mx_widen_weights      mk_mx_weight_params   any x 256       a weight in whatever form -> bf16 as a product sees it
 *   mok_mx_take_part          mk_mx_part_params     any x 256       rows and columns out of a quantised stack -> a stack of its own
 *
 * All work is spread over whatever grid there is. rows and cols are multiples of 32; all pointers are multiples of 16. */
#ifndef MK_CUDA_KERNEL_MX_PARAMS_H
#define MK_CUDA_KERNEL_MX_PARAMS_H

#include "mx/mx.h"

enum { MK_MX_TURNED_ROWS = 128, MK_MX_TURNED_COLS = 64, MK_MX_TURNED_SHARED = MK_MX_TURNED_ROWS * MK_MX_TURNED_COLS * 2 };

typedef struct mk_mx_rows_params {
    void *bf16;             /* [num_rows, cols] */
    void *rows;             /* num_rows rows of mk_mx_row_stride(cols) bytes */
    int64_t num_rows, cols;
    uint64_t *not_finite;   /* NaN and infinities are added; may be NULL */
} mk_mx_rows_params;

typedef struct mk_mx_matrix_params {
    void *bf16;             /* [count, rows, cols] */
    void *data, *scales;    /* turned: of [cols, rows] matrices */
    int64_t count, rows, cols;
    uint64_t *not_finite;   /* as above, by mok_mx_quantise_matrix and _turned: each sees all elements */
    int64_t matrix_elements, row_stride; /* of bf16, in elements: from one matrix to the next, from one row to the next */
    const void *const *experts;          /* quantising: [count] addresses of matrices, in place of bf16; or NULL */
    int64_t experts_offset;              /* elements from such an address to the first row */
} mk_mx_matrix_params;

/* Rows [first_row, + rows) and columns [first_col, + cols) of e4m3 [count, stored_rows, stored_cols] with blocks along the columns; all but the
 * stored rows in multiples of 32. Where these begin at no multiple of 128, scales in tiles can not be read where they lie. */
typedef struct mk_mx_part_params {
    const void *source, *source_scales;
    void *data, *scales;                  /* [count, rows, cols] */
    int64_t count, rows, cols, first_row, first_col, stored_rows, stored_cols;
} mk_mx_part_params;

/* What a layer's weight is given as, and which of its quantisations is wanted. */
typedef enum mk_mx_form {
    MK_MX_BF16_ALONG,  /* bf16, to be quantised along the columns */
    MK_MX_BF16_DOWN,   /* bf16, down the rows */
    MK_MX_QUANTISED,   /* e4m3 [count, stored_rows, cols] and scales, blocks along the columns */
    MK_MX_TURNED       /* e4m3 [count, cols, stored_rows] and scales, blocks along the stored rows */
} mk_mx_form;

typedef struct mk_mx_weight_params {
    const void *source, *scales;
    const void *const *experts;                   /* bf16: [count] addresses, in place of source; else NULL */
    uint16_t *wide;                               /* [count, rows, cols] bf16 */
    int64_t count, rows, cols;
    int64_t matrix_elements, offset, row_stride;  /* bf16: from one matrix to the next, to its first row, from one row to the next */
    int64_t first_row, stored_rows;               /* quantised: the rows wanted are [first_row, first_row + rows) of those stored */
    int32_t form;                                 /* mk_mx_form */
} mk_mx_weight_params;

#endif
