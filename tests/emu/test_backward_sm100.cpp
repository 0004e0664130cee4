/* The same backward on emulated Blackwell. */
#define MK_SM100
#include "test_backward.cpp"
