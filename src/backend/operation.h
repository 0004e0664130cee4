/* The collective operations, known to host and device. */
#ifndef MK_BACKEND_OPERATION_H
#define MK_BACKEND_OPERATION_H

typedef enum mk_operation { MK_OP_SCHEDULE = 1, MK_OP_FORWARD, MK_OP_RECOMPUTE, MK_OP_BACKWARD } mk_operation;

#endif
