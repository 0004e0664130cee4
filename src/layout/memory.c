#include "layout/memory.h"

void mk_memory_map(const mk_dims *d, mk_memory *memory, mok_buffer_info *infos)
{
    int64_t end[5] = {0, 0, 0, 0, 0};
    int index = 0;
#define PLACE(kind_, name_, bytes_, count_)                                                                    \
    do {                                                                                                       \
        int64_t bytes = (int64_t)(bytes_) * (count_);                                                          \
        memory->name_ = end[MOK_MEM_##kind_];                                                                  \
        if (infos)                                                                                             \
            infos[index] = (mok_buffer_info){#name_, MOK_MEM_##kind_, memory->name_, bytes};                   \
        index++;                                                                                               \
        end[MOK_MEM_##kind_] += mk_round_up(bytes, MK_BUFFER_ALIGN);                                           \
    } while (0);
    MK_BUFFER_LIST(PLACE)
#undef PLACE
    memory->heap_bytes = end[MOK_MEM_HEAP];
    memory->local_bytes = end[MOK_MEM_LOCAL];
    memory->schedule_bytes = end[MOK_MEM_SCHEDULE];
    memory->context_bytes = end[MOK_MEM_CONTEXT];
    memory->weights_bytes = end[MOK_MEM_WEIGHTS];
}
