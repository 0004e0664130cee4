/* Memory helpers: the backend's memory for callers without an allocator of their own. */
#include "backend/backend.h"
#include "base/error.h"

mok_status mok_memory_alloc(mok_workspace *w, size_t bytes, void **memory)
{
    if (!w || !memory)
        return mk_fail(MOK_E_ARG, "%s is NULL", w ? "memory" : "workspace");
    return w->backend->memory_alloc(w, bytes, memory);
}

void mok_memory_free(mok_workspace *w, void *memory)
{
    if (w && memory)
        w->backend->memory_free(w, memory);
}

mok_status mok_memory_copy(mok_workspace *w, void *to, const void *from, size_t bytes)
{
    MK_TRY(mk_check_workspace(w));
    if (bytes && (!to || !from))
        return mk_fail(MOK_E_ARG, "%s is NULL", to ? "from" : "to");
    return w->backend->memory_copy(w, to, from, bytes);
}
