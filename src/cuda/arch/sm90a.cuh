/* Hopper's matrix unit: wgmma, 128 threads (a warpgroup) on a 64 x N tile, operands in shared memory.
 *
 * Accumulator layout: thread t of the warpgroup (warp w = t/32, lane l) holds in register i of N/2
 *   row 16w + l/4 + 8((i>>1)&1), column 8(i>>2) + 2(l%4) + (i&1).
 * See the PTX manual, chapter wgmma. */
#ifndef MK_ARCH_SM90A_CUH
#define MK_ARCH_SM90A_CUH

namespace mk {

/* Before the first MMA, and after other instructions have touched the accumulators. */
MK_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
MK_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/* All but the youngest N groups are complete: their accumulators may be read, their operands overwritten. */
template <int N> MK_DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory"); }
/* Keeps the compiler from moving uses of an accumulator across this point. */
MK_DEVICE void pin_register(float &r) { asm volatile("" : "+f"(r) :: "memory"); }

/* Lists of ten operands whose numbers start with the digits `t` (none for the first ten). */
#define MK_REG10(t) "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9, "
#define MK_ACC4(t) "+f"(d[t##0]), "+f"(d[t##1]), "+f"(d[t##2]), "+f"(d[t##3])
#define MK_ACC10(t) MK_ACC4(t), "+f"(d[t##4]), "+f"(d[t##5]), "+f"(d[t##6]), "+f"(d[t##7]), "+f"(d[t##8]), "+f"(d[t##9])

/* D = A B^T (accumulate false) or D += A B^T over 16 bf16 of the contraction axis. A and B are matrix descriptors; MnMajor is 0
 * where the contraction axis is the contiguous one, 1 where the other axis is. */
template <int AMnMajor, int BMnMajor> MK_DEVICE void wgmma_m64n64k16_bf16(float (&d)[32], uint64_t a, uint64_t b, bool accumulate)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                 MK_REG10() MK_REG10(1) MK_REG10(2) "%30, %31}, %32, %33, p, 1, 1, %35, %36;\n}"
                 : MK_ACC10(), MK_ACC10(1), MK_ACC10(2), "+f"(d[30]), "+f"(d[31])
                 : "l"(a), "l"(b), "r"((int)accumulate), "n"(AMnMajor), "n"(BMnMajor) : "memory");
}
template <int AMnMajor, int BMnMajor> MK_DEVICE void wgmma_m64n128k16_bf16(float (&d)[64], uint64_t a, uint64_t b, bool accumulate)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                 MK_REG10() MK_REG10(1) MK_REG10(2) MK_REG10(3) MK_REG10(4) MK_REG10(5) "%60, %61, %62, %63}, %64, %65, p, 1, 1, %67, %68;\n}"
                 : MK_ACC10(), MK_ACC10(1), MK_ACC10(2), MK_ACC10(3), MK_ACC10(4), MK_ACC10(5), MK_ACC4(6)
                 : "l"(a), "l"(b), "r"((int)accumulate), "n"(AMnMajor), "n"(BMnMajor) : "memory");
}
template <int AMnMajor, int BMnMajor> MK_DEVICE void wgmma_m64n256k16_bf16(float (&d)[128], uint64_t a, uint64_t b, bool accumulate)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
                 MK_REG10() MK_REG10(1) MK_REG10(2) MK_REG10(3) MK_REG10(4) MK_REG10(5) MK_REG10(6) MK_REG10(7) MK_REG10(8) MK_REG10(9)
                 MK_REG10(10) MK_REG10(11) "%120, %121, %122, %123, %124, %125, %126, %127}, %128, %129, p, 1, 1, %131, %132;\n}"
                 : MK_ACC10(), MK_ACC10(1), MK_ACC10(2), MK_ACC10(3), MK_ACC10(4), MK_ACC10(5), MK_ACC10(6), MK_ACC10(7), MK_ACC10(8),
                   MK_ACC10(9), MK_ACC10(10), MK_ACC10(11), MK_ACC4(12), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
                 : "l"(a), "l"(b), "r"((int)accumulate), "n"(AMnMajor), "n"(BMnMajor) : "memory");
}
#undef MK_REG10
#undef MK_ACC4
#undef MK_ACC10

} /* namespace mk */
#endif
