/* Where ranks meet: barriers of epochs in the heaps, and the agreement of all ranks on what they are calling. */
#ifndef MK_CPU_CALL_H
#define MK_CPU_CALL_H

#include "backend/backend.h"

/* A call begins in two steps. Open: from here on this rank may publish its inputs in its heap (what the last call left there
 * has been read by all). Meet: the call's first barrier, after which all ranks' announcements are compared, with the same
 * verdict on every rank: MOK_OK, MOK_E_PEER if a rank refuses, MOK_E_MISMATCH; or MOK_E_TIMEOUT here. */
mok_status mk_cpu_call_open(mok_workspace *w, const mk_call *call, uint64_t schedule_number);
mok_status mk_cpu_call_meet(mok_workspace *w, const mk_call *call);

/* Takes part in the first barrier of a call that this rank refuses, without waiting for it. */
void mk_cpu_call_refuse(mok_workspace *w, mk_operation operation, uint64_t layer, mok_status status, void *stream);

/* All ranks' writes before it are visible to all ranks after it. `stage` names the wait if it runs out. */
mok_status mk_cpu_barrier(mok_workspace *w, const char *stage, uint64_t layer);

/* What rank r announced for the running call. */
const mk_call_head *mk_cpu_call_head(const mok_workspace *w, int32_t r);

/* Sleeps a little longer each time it is called in one wait; `spins` starts at 0. */
void mk_cpu_relax(uint32_t *spins);
int64_t mk_cpu_now_ms(void);

#endif
