/* The encodings of the matrix units against values worked out by hand from the manuals' tables. */
#include "cuda/arch/tensor_core.h"
#include "test.h"

#define CHECK_HEX(got, expected) do { unsigned long long g_ = (got), e_ = (expected); if (g_ != e_) TEST_FAILED("%s is %llx, not %llx", #got, g_, e_); } while (0)

TEST(shared_memory_descriptor_of_hopper)
{
    CHECK_HEX(mk_smem_descriptor_sm90(0x8400, 16, 1024, MK_SMEM_SWIZZLE_128B), 0x4000004000010840ull);
    CHECK_HEX(mk_smem_descriptor_sm90(0x8400, 8192, 1024, MK_SMEM_SWIZZLE_128B), 0x4000004002000840ull);
    CHECK_HEX(mk_operand_sm90(0x8400), 0x4000004000010840ull);
}

TEST(shared_memory_descriptor_of_blackwell)
{
    CHECK_HEX(mk_smem_descriptor_sm100(0x8400, 0, 1024, MK_SMEM_SWIZZLE_128B), 0x4000404000000840ull);
    CHECK_HEX(mk_smem_descriptor_sm100(0x8400, 16, 1024, MK_SMEM_SWIZZLE_128B), 0x4000404000010840ull);
    CHECK_HEX(mk_operand_sm100(0x8400), 0x4000404000010840ull);
    CHECK_HEX(mk_scale_descriptor_sm100(0x30000), 0x0000400800003000ull);
    /* three-bit swizzle codes 2, 4, 6 in bits 61-63 */
    CHECK_HEX(mk_smem_descriptor_sm100(0, 0, 0, MK_SMEM_SWIZZLE_128B) >> 61, 2);
    CHECK_HEX(mk_smem_descriptor_sm100(0, 0, 0, MK_SMEM_SWIZZLE_64B) >> 61, 4);
    CHECK_HEX(mk_smem_descriptor_sm100(0, 0, 0, MK_SMEM_SWIZZLE_32B) >> 61, 6);
}

/* An address in another CTA's window, or past 256 KiB, has bits that no descriptor holds. */
TEST(descriptor_keeps_18_bits_of_the_address)
{
    CHECK_HEX(mk_operand_sm100(0x01008400), mk_operand_sm100(0x8400));
    CHECK_HEX(mk_operand_sm100(0x3fff0) & 0x3fff, 0x3fff);
}

TEST(instruction_descriptor_of_bf16)
{
    CHECK_HEX(mk_mma_descriptor_bf16(128, 128, 0, 0), 0x08200490);
    CHECK_HEX(mk_mma_descriptor_bf16(128, 256, 0, 0), 0x08400490);
    CHECK_HEX(mk_mma_descriptor_bf16(256, 256, 0, 0), 0x10400490);
    CHECK_HEX(mk_mma_descriptor_bf16(256, 256, 1, 1), 0x10400490 | 1u << 15 | 1u << 16);
}

TEST(instruction_descriptor_of_mxfp8)
{
    static const uint32_t one_cta[] = {0x08C00000, 0x28C00010, 0x48C00020, 0x68C00030};
    static const uint32_t two_ctas[] = {0x10C00000, 0x30C00010, 0x50C00020, 0x70C00030};
    for (uint32_t id = 0; id < 4; id++) {
        CHECK_HEX(mk_mma_descriptor_mx(128, 256, 0, 0, MK_MMA_E4M3, MK_MMA_E4M3, id, id), one_cta[id]);
        CHECK_HEX(mk_mma_descriptor_mx(256, 256, 0, 0, MK_MMA_E4M3, MK_MMA_E4M3, id, id), two_ctas[id]);
    }
    CHECK_HEX(mk_mma_descriptor_mx(256, 128, 0, 0, MK_MMA_E5M2, MK_MMA_E4M3, 0, 0), 0x10A00080);
    CHECK_HEX(mk_mma_descriptor_mx(256, 256, 1, 0, MK_MMA_E4M3, MK_MMA_E4M3, 0, 0), 0x10C08000);
    CHECK_HEX(mk_mma_descriptor_mx(256, 256, 1, 1, MK_MMA_E4M3, MK_MMA_E4M3, 1, 1), 0x30C18010);
}

TEST(scales_in_memory)
{
    CHECK_EQ(mk_scale_byte(37, 2, 8), 86);
    CHECK_EQ(mk_scale_byte(200, 5, 8), 1673);
    CHECK_EQ(mk_scale_bytes(200, 8), 2048);
    CHECK_EQ(mk_scale_bytes(1, 1), 512);
}

/* Every scale has a byte of its own, and none lies outside. */
TEST(scales_do_not_overlap)
{
    enum { ROWS = 256, BLOCKS = 12 };
    static uint8_t seen[ROWS * BLOCKS];
    CHECK_EQ(mk_scale_bytes(ROWS, BLOCKS), ROWS * BLOCKS);
    for (int64_t row = 0; row < ROWS; row++)
        for (int64_t block = 0; block < BLOCKS; block++) {
            int64_t at = mk_scale_byte(row, block, BLOCKS);
            CHECK(at >= 0 && at < ROWS * BLOCKS && !seen[at]);
            seen[at] = 1;
        }
}

/* tcgen05.cp takes row l of an atom (16 bytes) to lane l of four columns: that must be where mk_scale_cell says. */
TEST(scales_in_tensor_memory)
{
    for (uint32_t row = 0; row < 128; row++)
        for (uint32_t block = 0; block < 4; block++) {
            uint32_t byte = (uint32_t)mk_scale_byte(row, block, 4), lane = byte / 16, column = byte % 16 / 4;
            CHECK_HEX(mk_scale_cell(row), mk_tmem_address(lane, column));
            CHECK_EQ(byte % 4, block);
        }
    CHECK_HEX(mk_scale_cell(128), 4);
    CHECK_HEX(mk_scale_cell(200), mk_tmem_address(8, 6));
    CHECK_HEX(mk_tmem_address(96, 320), 0x00600140);
}

int main(int argc, char **argv) { return test_main(argc, argv); }
