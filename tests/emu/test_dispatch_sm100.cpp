/* Dispatch on emulated Blackwell, whose ring has MXFP8 as it came. */
#define MK_SM100
#include "test_dispatch.cpp"
