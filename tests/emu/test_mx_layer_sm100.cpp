/* The same layer in MXFP8 on emulated Blackwell: operands widened to bf16, as on Hopper, so the bits are Hopper's. */
#define MK_SM100
#include "test_mx_layer.cpp"
