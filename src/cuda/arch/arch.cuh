/* The arch layer: everything device code may ask of the machine, one function per instruction.
 *
 * Device code includes this file and nothing below it. nvcc gets inline PTX (common.cuh for what both chips have, sm90a.cuh
 * for Hopper's matrix unit, sm100a.cuh for Blackwell's; MK_SM100 is defined where code is compiled for the latter); g++ -DMOK_EMU gets the emulator, with the same names and the same meaning. The order and
 * scope of an operation are in its name; where a name has none, the instruction orders nothing.
 *
 * Shared memory is addressed by 32-bit numbers, as the instructions do: `smem_addr` gives a CTA's own, `cluster_addr` that
 * of the same object in another CTA of the cluster. Plain reads and writes go through `load` and `store`, so that the
 * emulator sees them. */
#ifndef MK_ARCH_CUH
#define MK_ARCH_CUH

#include <stdint.h>
#include "cuda/arch/tensor_map.h"

namespace mk {
struct alignas(16) Vec4 { uint32_t x, y, z, w; };  /* 16 bytes: what one lane moves at once */
}

#ifdef MOK_EMU
#include "emu/arch_emu.h"
#include "emu/arch_emu_sm100.h"
#else
#include "cuda/arch/common.cuh"
#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__) || defined(__CUDA_ARCH_SPECIFIC__)
#if __CUDA_ARCH_FAMILY_SPECIFIC__ >= 1000 && __CUDA_ARCH_FAMILY_SPECIFIC__ < 1100
#define MK_SM100
#endif
#endif
#include "cuda/arch/sm90a.cuh"
#include "cuda/arch/sm100a.cuh"
#endif

namespace mk {
/* Do the tensor cores multiply MXFP8 operands as they are, with their scales? */
#ifdef MK_SM100
constexpr bool kMultipliesMx = true;
#else
constexpr bool kMultipliesMx = false;
#endif
}
#endif
