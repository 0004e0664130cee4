/* Weights by pointer: what mok_weight_maps is told about them. The table of pointers is the device's, so it alone sees which cannot be used. */
#include "cuda/host/state.h"

int64_t mk_cuda_up_offset(const mok_workspace *w, int64_t width)
{
    int64_t row = w->dims.hidden * 2;
    return w->config.gate_up == MOK_GATE_UP_SEPARATE ? 0 : w->config.gate_up == MOK_GATE_UP_COMBINED ? width * row : row;
}

bool mk_cuda_maps_experts(const mok_workspace *w, const mok_weights *m, bool shared)
{
    if (shared)
        return m->shared_gate.experts || m->shared_up.experts || m->shared_down.experts;
    return !w->dims.mx && (m->gate.experts || m->up.experts || m->down.experts);
}

const mk_tensor_map *mk_cuda_expert_maps(const mok_workspace *w, const mok_weights *m, bool shared)
{
    int64_t place = shared ? w->memory.shared_maps : w->memory.expert_maps;
    return mk_cuda_maps_experts(w, m, shared) ? (const mk_tensor_map *)(const void *)(w->local + place) : NULL;
}

/* Where one weight's matrices come from. count: 0 if they are not looked at. */
static mk_weight_source source_of(const mok_weight *m, int64_t count, int64_t expert_bytes, int64_t offset, bool mapped)
{
    return (mk_weight_source){.experts = m->experts, .packed = m->packed, .expert_bytes = expert_bytes, .offset = offset, .mapped = mapped,
                              .count = mapped || m->experts ? (int32_t)count : 0};
}

/* Three places of mk_weight_maps_params, of the routed experts or the shared one: so many. down: the call multiplies with that too. mapped: else
 * only pointers are looked at. */
static void fill_sources(const mok_workspace *w, const mok_weights *m, bool shared, int64_t count, bool down, bool mapped, mk_weight_source *to)
{
    bool separate = w->config.gate_up == MOK_GATE_UP_SEPARATE;
    int64_t width = shared ? w->dims.shared_intermediate : w->dims.intermediate, matrix = width * w->dims.hidden * 2, pair = separate ? matrix : 2 * matrix;
    const mok_weight *gate = shared ? &m->shared_gate : &m->gate, *up = !separate ? gate : shared ? &m->shared_up : &m->up;
    to[MK_GRAD_GATE] = source_of(gate, count, pair, 0, mapped);
    to[MK_GRAD_UP] = source_of(up, count, pair, mk_cuda_up_offset(w, width), mapped);
    to[MK_GRAD_DOWN] = source_of(shared ? &m->shared_down : &m->down, down ? count : 0, matrix, 0, mapped);
}

static void fill_maps(const mk_cuda_state *s, mk_operation operation, bool shared, mk_tensor_map *to)
{
    const mk_cuda_gemm *gate_up = &s->gemm[shared ? MK_GEMM_SHARED_GATE_UP : MK_GEMM_GATE_UP], *down = &s->gemm[shared ? MK_GEMM_SHARED_DOWN : MK_GEMM_DOWN];
    const mk_tensor_map *backward = s->backward + (shared ? MK_MAP_SHARED : 0) + MK_MAP_WGATE;
    bool back = operation == MK_OP_BACKWARD;
    to[MK_GRAD_GATE] = back ? backward[MK_GRAD_GATE] : gate_up->b_low;
    to[MK_GRAD_UP] = back ? backward[MK_GRAD_UP] : gate_up->b_high;
    to[MK_GRAD_DOWN] = back ? backward[MK_GRAD_DOWN] : down->b_low;
}

static int64_t count_matrices(const mk_weight_maps_params *p)
{
    int64_t matrices = 0;
    for (int i = 0; i < MK_WEIGHT_PLACES; i++)
        matrices += p->source[i].count;
    return matrices;
}

/* Where the device notes the first bad pointer. */
static uint64_t *note_at(const mok_workspace *w, size_t offset) { return (uint64_t *)(void *)(w->local + w->memory.device_state + offset); }

int64_t mk_cuda_weight_maps(const mok_workspace *w, mk_operation operation, const mok_weights *m, int64_t num_tokens, mk_weight_maps_params *p)
{
    const mk_cuda_state *s = w->state;
    bool down = operation != MK_OP_RECOMPUTE;
    *p = (mk_weight_maps_params){.rank = s->rank, .bad_weight = note_at(w, offsetof(mk_device_state, bad_weight.given))};
    fill_sources(w, m, false, w->dims.capacity_tiles ? w->dims.experts_count : 0, down, mk_cuda_maps_experts(w, m, false), p->source);
    fill_sources(w, m, true, w->dims.shared_intermediate && num_tokens ? 1 : 0, down, mk_cuda_maps_experts(w, m, true), p->source + MK_EXPERT_MAPS);
    int64_t matrices = count_matrices(p);
    for (int shared = 0; shared < 2 && matrices; shared++)
        fill_maps(s, operation, shared, p->like + shared * MK_EXPERT_MAPS);
    return matrices;
}

int64_t mk_cuda_weights_to_widen(const mok_workspace *w, const mok_weights *m, mk_weight_maps_params *p)
{
    const mk_cuda_state *s = w->state;
    *p = (mk_weight_maps_params){.rank = s->rank, .bad_weight = note_at(w, offsetof(mk_device_state, bad_weight.widened))};
    fill_sources(w, m, false, w->dims.experts_count, true, false, p->source);
    return count_matrices(p);
}
