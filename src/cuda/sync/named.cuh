/* The hardware barriers of a CTA (bar.sync, ids 0..15): one list, so that no two users share an id. */
#ifndef MK_SYNC_NAMED_CUH
#define MK_SYNC_NAMED_CUH

namespace mk {

enum NamedBarrier : uint32_t {
    BARRIER_BLOCK = 0,      /* barrier_block_sync */
    BARRIER_MATH_TURN = 1,  /* 1 and 2: ping-pong, whose turn it is to issue MMAs; one per math warpgroup. With store warps: its warps' MMAs are done */
    BARRIER_ZERO_TAIL = 3,  /* 3 and 4: a math warpgroup has zeroed the ragged end of its operands */
};

} /* namespace mk */
#endif
