/* The reports of tests/multi/rows.h on the emulated GPU: the same bodies as on a real one, through mok.h, host code and kernels. */
#define TEST_WATCHDOG 900
#include "emulated_driver.h"

extern "C" {
#include "backend/backend.h"
#include "layer.h"
#include "layer_rank.h"
#include "reference.h"
}

#include "../gpu/gpu.h"

static const int32_t kDevices[16] = {0};
#define ROWS_BACKEND MOK_BACKEND_CUDA
#define ROWS_DEVICES kDevices
#define ROWS_POISON poison_ring
#define ROWS_BEFORE_RUN() emulated::plug_in(test_seed(), 2)
#define ROWS_SLOW 1
#include "../multi/rows.h"

int main(int argc, char **argv) { return test_main(argc, argv); }
