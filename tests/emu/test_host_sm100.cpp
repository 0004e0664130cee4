/* The host code on emulated Blackwell: its tensor maps, tiles and grids. */
#define MK_SM100
#include "test_host.cpp"
