/* The emulator's tensor map: the fields the driver's opaque 128 bytes stand for. */
#ifndef MK_EMU_TENSOR_MAP_H
#define MK_EMU_TENSOR_MAP_H

#include <stdint.h>
#include "cuda/arch/tensor_map.h"

namespace emu {

constexpr uint64_t kTensorMapMagic = 0x70616d2d756d65ull; /* "emu-map" */

struct TensorMap {
    uint64_t magic, address;
    uint64_t dim[3];           /* elements; unused ones 1 */
    uint64_t stride_bytes[2];
    uint32_t box[3];           /* elements; unused ones 1 */
    uint32_t rank, element_bytes, swizzle;
};
static_assert(sizeof(TensorMap) <= sizeof(mk_tensor_map), "the emulator's map lies inside the real one");

} /* namespace emu */
#endif
