/* Blackwell's GEMM core on MXFP8 operands, compiled: what tools/check_scaled_gemm.sh looks at. The emulator runs it (tests/emu/test_gemm_scaled_sm100.cpp). */
#include "cuda/gemm/gemm.cuh"

using namespace mk;

typedef GroupedScaledProgram<TilePairScaled> ScaledProgram;

MK_ENTRY MK_KERNEL(kGemmThreads) scaled_gemm_down(MK_KERNEL_PARAM ScaledProgram program, MK_KERNEL_PARAM StoreRows<MatrixRows> epilogue)
{
    gemm_cta<TilePairScaled>(program, epilogue);
}

MK_ENTRY MK_KERNEL(kGemmThreads) scaled_gemm_gate_up(MK_KERNEL_PARAM ScaledProgram program, MK_KERNEL_PARAM SwigluRows<MatrixRows, MatrixRows> epilogue)
{
    gemm_cta<TilePairScaled>(program, epilogue);
}
