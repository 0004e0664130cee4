/* mok_mx_quantise on a GPU: two launches on the caller's stream, on the device that the memory is of. Needs no workspace. */
#include "cuda/host/state.h"

#include "cuda/kernel/mx_params.h"

enum { BLOCKS_PER_SM = 8 };

/* Devices that were used here stay open, so that their kernels are loaded once. */
static uint64_t kept;

static mok_status open_device(int32_t ordinal, mk_cuda_device **device)
{
    MK_TRY(mk_cuda_device_open(ordinal, device));
    uint64_t bit = (uint64_t)1 << ordinal % 64;
    if (__atomic_fetch_or(&kept, bit, __ATOMIC_ACQ_REL) & bit)
        mk_cuda_device_close(*device); /* an earlier call's user remains */
    return mk_cuda_device_load(*device);
}

/* All of one device. NULL is not looked at. */
static mok_status check_memory(const mk_cuda_driver *api, const char *name, const void *pointer, int *ordinal)
{
    int attributes[] = {MK_CU_POINTER_MEMORY_TYPE, MK_CU_POINTER_DEVICE_ORDINAL}, device = -1;
    unsigned type = 0;
    void *values[] = {&type, &device};
    if (!pointer)
        return MOK_OK;
    if ((uintptr_t)pointer % 16)
        return mk_fail(MOK_E_ARG, "%s is at %p: backend cuda needs it aligned to 16 bytes", name, pointer);
    MK_CUDA_TRY(api->cuPointerGetAttributes(2, attributes, values, mk_cu_address(pointer)), "asking the driver what %s (at %p) is", name, pointer);
    if (type == 0)
        return mk_fail(MOK_E_ARG, "%s is at %p, which is no memory of the CUDA driver: backend cuda takes device pointers", name, pointer);
    if (*ordinal >= 0 && device != *ordinal)
        return mk_fail(MOK_E_ARG, "%s is on device %d, but source is on device %d", name, device, *ordinal);
    *ordinal = device;
    return MOK_OK;
}

static mok_status launch_blocks(const mk_cuda_device *d, mk_cuda_kernel kernel, int64_t blocks, void *p, void *stream)
{
    const mk_cuda_kernel_shape *shape = &mk_cuda_kernel_shapes[kernel];
    mk_cu_launch config = {.grid_x = (unsigned)blocks, .grid_y = 1, .grid_z = 1, .block_x = d->kernels.threads[kernel], .block_y = 1, .block_z = 1,
                           .shared_bytes = shape->shared, .stream = stream};
    void *list[] = {p};
    MK_CUDA_TRY(d->api->cuLaunchKernelEx(&config, d->kernels.function[kernel], list, NULL), "launching %s (%u blocks on device %d)", shape->name,
                config.grid_x, d->ordinal);
    return MOK_OK;
}

/* Of kernels that spread their work over whatever grid there is. */
static mok_status launch(const mk_cuda_device *d, mk_cuda_kernel kernel, int64_t pieces, void *p, void *stream)
{
    return launch_blocks(d, kernel, mk_max(mk_min(pieces, (int64_t)d->num_sms * BLOCKS_PER_SM), 1), p, stream);
}

static mok_status launch_both(const mk_cuda_device *d, const mok_mx_quantise_args *a, mk_cu_pointer not_finite, void *stream)
{
    mk_mx_matrix_params p = {.bf16 = (void *)(uintptr_t)a->source, .data = a->data, .scales = a->scales, .count = a->count, .rows = a->rows,
                             .cols = a->cols, .not_finite = (uint64_t *)(uintptr_t)not_finite, .matrix_elements = a->rows * a->cols, .row_stride = a->cols};
    if (a->data)
        MK_TRY(launch(d, MK_CUDA_mok_mx_quantise_matrix, mk_ceil_div(a->count * mk_round_up(a->rows, MK_MX_TILE), 8), &p, stream));
    p.data = a->transposed;
    p.scales = a->transposed_scales;
    p.not_finite = a->data ? NULL : p.not_finite;
    int64_t tiles = mk_ceil_div(a->rows, MK_MX_TURNED_ROWS) * mk_ceil_div(a->cols, MK_MX_TILE) * (MK_MX_TILE / MK_MX_TURNED_COLS);
    return a->transposed ? launch(d, MK_CUDA_mok_mx_quantise_turned, a->count * tiles, &p, stream) : MOK_OK;
}

/* With the context current. Counting blocks, as the number goes to host memory. */
static mok_status quantise_entered(const mk_cuda_device *d, const mok_mx_quantise_args *a, void *stream)
{
    mk_cu_pointer counter = 0;
    uint64_t counted = 0;
    if (!a->not_finite)
        return launch_both(d, a, 0, stream);
    MK_CUDA_TRY(d->api->cuMemAlloc(&counter, sizeof counted), "allocating a counter on device %d", d->ordinal);
    mk_cu_result result = d->api->cuMemsetD8(counter, 0, sizeof counted);
    if (result == MK_CU_SUCCESS)
        result = d->api->cuCtxSynchronize(); /* the stream need not wait for the null stream */
    mok_status status = result == MK_CU_SUCCESS ? launch_both(d, a, counter, stream) : mk_cuda_fail(result, "clearing a counter on device %d", d->ordinal);
    if (status == MOK_OK) {
        result = d->api->cuCtxSynchronize();
        if (result == MK_CU_SUCCESS)
            result = d->api->cuMemcpyDtoH(&counted, counter, sizeof counted);
        status = result == MK_CU_SUCCESS ? MOK_OK : mk_cuda_fail(result, "reading a counter from device %d", d->ordinal);
    }
    d->api->cuMemFree(counter);
    if (status == MOK_OK)
        *a->not_finite = (int64_t)counted;
    return status;
}

mok_status mk_cuda_mx_quantise(const mok_mx_quantise_args *a, void *stream)
{
    const mk_cuda_driver *api;
    mk_cuda_device *device;
    int ordinal = -1;
    if (a->not_finite)
        *a->not_finite = 0;
    if (!a->source || !a->count || !a->rows || !a->cols)
        return MOK_OK;
    MK_TRY(mk_cuda_driver_get(&api));
    MK_TRY(check_memory(api, "source", a->source, &ordinal));
    MK_TRY(check_memory(api, "data", a->data, &ordinal));
    MK_TRY(check_memory(api, "scales", a->scales, &ordinal));
    MK_TRY(check_memory(api, "transposed", a->transposed, &ordinal));
    MK_TRY(check_memory(api, "transposed_scales", a->transposed_scales, &ordinal));
    MK_TRY(open_device(ordinal, &device));
    MK_TRY(mk_cuda_enter(device));
    mok_status status = quantise_entered(device, a, stream);
    mk_cuda_leave(device);
    return status;
}

/* --- a layer's weights, widened --------------------------------------------------------------------------------------- */
char *mk_cuda_wide(const mok_workspace *w, const void *given, mk_quant quant)
{
    return given ? (char *)(uintptr_t)given : w->local + w->memory.wide_weights + (quant == MK_QUANT_DGRAD ? w->memory.weights_bytes : 0);
}

mk_mx_weight_params mk_cuda_mx_weight(const mok_workspace *w, const mok_weights *weights, int matrix, mk_quant quant, char *wide)
{
    const mk_dims *d = &w->dims;
    bool down = matrix == MK_GRAD_DOWN, one = !down && w->config.gate_up != MOK_GATE_UP_SEPARATE, interleaved = one && w->config.gate_up == MOK_GATE_UP_INTERLEAVED;
    const mok_weight *weight = down ? &weights->down : matrix == MK_GRAD_UP && !one ? &weights->up : &weights->gate;
    int64_t rows = down ? d->hidden : d->intermediate, cols = down ? d->intermediate : d->hidden;
    int64_t first = one && matrix == MK_GRAD_UP ? (interleaved ? 1 : rows) : 0; /* row of the stored matrix */
    const int64_t place[MK_NUM_GRADS] = {[MK_GRAD_GATE] = w->memory.wide_gate, [MK_GRAD_UP] = w->memory.wide_up, [MK_GRAD_DOWN] = w->memory.wide_down};
    mk_mx_weight_params p = {.wide = (uint16_t *)(void *)(wide + place[matrix]), .count = d->experts_count, .rows = rows, .cols = cols,
                             .stored_rows = one ? 2 * rows : rows, .first_row = first};
    if (mk_mx_is_quantised(weight)) {
        p.form = quant == MK_QUANT_DGRAD ? MK_MX_TURNED : MK_MX_QUANTISED;
        p.source = quant == MK_QUANT_DGRAD ? weight->transposed : weight->packed;
        p.scales = quant == MK_QUANT_DGRAD ? weight->transposed_scales : weight->scales;
        return p;
    }
    p.form = quant == MK_QUANT_DGRAD ? MK_MX_BF16_DOWN : MK_MX_BF16_ALONG;
    p.source = weight->packed;
    p.experts = weight->experts;
    p.matrix_elements = p.stored_rows * cols;
    p.offset = first * cols;
    p.row_stride = interleaved ? 2 * cols : cols;
    return p;
}

/* --- a layer's weights as Blackwell's tensor cores read them ------------------------------------------------------------ */
static const char *scaled_copy(const mok_workspace *w, int matrix, mk_quant quant)
{
    const mk_memory *m = &w->memory;
    const int64_t place[2][MK_NUM_GRADS] = {{m->scaled_gate, m->scaled_up, m->scaled_down}, {m->scaled_gate_bwd, m->scaled_up_bwd, m->scaled_down_bwd}};
    return w->local + place[quant == MK_QUANT_DGRAD][matrix];
}

/* Rows and columns of a matrix that are a multiple of 128 from the beginning of what is stored begin with an atom of scales. */
mk_cuda_mx_operand mk_cuda_mx_operand_of(const mok_workspace *w, const mok_weights *weights, int matrix, mk_quant quant)
{
    const mk_mx_weight_params p = mk_cuda_mx_weight(w, weights, matrix, quant, NULL);
    const bool turned = quant == MK_QUANT_DGRAD, quantised = p.form == MK_MX_QUANTISED || p.form == MK_MX_TURNED;
    int64_t rows = turned ? p.cols : p.rows, cols = turned ? p.rows : p.cols; /* of the operand; and as it is stored, and where in there: */
    int64_t stored_rows = turned ? p.cols : p.stored_rows, stored_cols = turned ? p.stored_rows : p.cols, first_row = turned ? 0 : p.first_row, first_col = turned ? p.first_row : 0;
    const char *data = p.source, *scales = p.scales;
    bool own = !quantised || p.first_row % MK_MX_TILE;
    if (own) {
        stored_rows = rows, stored_cols = cols, first_row = first_col = 0;
        data = scaled_copy(w, matrix, quant);
        scales = data + p.count * rows * cols;
    }
    const int64_t atoms = mk_mx_scale_bytes(MK_MX_TILE, stored_cols);
    if (!data) /* the pass does not read it */
        return (mk_cuda_mx_operand){.own = false};
    return (mk_cuda_mx_operand){.data = data + first_row * stored_cols + first_col, .scales = scales + first_row / MK_MX_TILE * atoms + first_col / MK_MX_TILE * MK_MX_TILE_BYTES,
                                .count = p.count, .rows = rows, .cols = cols, .row_bytes = stored_cols, .matrix_bytes = stored_rows * stored_cols, .atoms_bytes = atoms,
                                .scales_bytes = mk_mx_scale_bytes(stored_rows, stored_cols), .own = own};
}

mk_mx_part_params mk_cuda_mx_part(const mok_workspace *w, const mok_weights *weights, int matrix, mk_quant quant)
{
    const mk_cuda_mx_operand to = mk_cuda_mx_operand_of(w, weights, matrix, quant);
    const mk_mx_weight_params p = mk_cuda_mx_weight(w, weights, matrix, quant, NULL);
    const bool turned = quant == MK_QUANT_DGRAD;
    return (mk_mx_part_params){.source = p.source, .source_scales = p.scales, .data = (void *)(uintptr_t)to.data, .scales = (void *)(uintptr_t)to.scales, .count = to.count,
                               .rows = to.rows, .cols = to.cols, .first_row = turned ? 0 : p.first_row, .first_col = turned ? p.first_row : 0,
                               .stored_rows = turned ? p.cols : p.stored_rows, .stored_cols = turned ? p.stored_rows : p.cols};
}

mk_mx_matrix_params mk_cuda_mx_quantise_params(const mok_workspace *w, const mok_weights *weights, int matrix, mk_quant quant)
{
    const mk_cuda_mx_operand to = mk_cuda_mx_operand_of(w, weights, matrix, quant);
    const mk_mx_weight_params p = mk_cuda_mx_weight(w, weights, matrix, quant, NULL);
    return (mk_mx_matrix_params){.bf16 = p.experts ? NULL : (uint16_t *)(uintptr_t)p.source + p.offset, .experts = p.experts, .experts_offset = p.offset,
                                 .data = (void *)(uintptr_t)to.data, .scales = (void *)(uintptr_t)to.scales,
                                 .count = p.count, .rows = p.rows, .cols = p.cols, .matrix_elements = p.matrix_elements, .row_stride = p.row_stride};
}

/* --- for the caller to keep ------------------------------------------------------------------------------------------- */
/* Blocks that have something to do. */
int64_t mk_cuda_mx_widen_pieces(const mk_mx_weight_params *p) { return mk_ceil_div(p->count * p->rows * p->cols, 8 * 8 * 256); }

static mok_status widen_all(const mok_workspace *w, const mok_weights *weights, mk_quant quant, void *wide, void *stream)
{
    const mk_cuda_state *s = w->state;
    for (int matrix = 0; matrix < MK_NUM_GRADS && wide; matrix++) {
        mk_mx_weight_params p = mk_cuda_mx_weight(w, weights, matrix, quant, wide);
        if (p.source || p.experts)
            MK_TRY(launch(s->device, MK_CUDA_mok_mx_widen_weights, mk_cuda_mx_widen_pieces(&p), &p, stream));
    }
    return MOK_OK;
}

/* An expert that has no address is told by the next pass, whatever the chip. */
mok_status mk_cuda_mx_widen(mok_workspace *w, const mok_mx_widen_args *a, void *stream)
{
    const mk_cuda_state *s = w->state;
    mk_weight_maps_params p;
    int64_t matrices = mk_cuda_weights_to_widen(w, &a->weights, &p);
    if (matrices)
        MK_TRY(launch_blocks(s->device, MK_CUDA_mok_weight_maps, mk_ceil_div(matrices, MK_WEIGHT_MAPS_PER_BLOCK), &p, stream));
    MK_TRY(widen_all(w, &a->weights, MK_QUANT_FORWARD, a->wide, stream));
    return widen_all(w, &a->weights, MK_QUANT_DGRAD, a->wide_dgrad, stream);
}
