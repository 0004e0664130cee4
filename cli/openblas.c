/* OpenBLAS at run time; see openblas.h. */
#include "openblas.h"

#include "term.h"

#include <dlfcn.h>
#include <math.h>
#include <stdlib.h>

/* From cblas.h, 32-bit integers: libopenblas64_ and its like have other names. */
enum { ROW_MAJOR = 101, NO_TRANSPOSE = 111, TRANSPOSE = 112 };
typedef void sgemm_fn(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha, const float *a, int lda,
                      const float *b, int ldb, float beta, float *c, int ldc);
typedef void set_num_threads_fn(int count);
typedef char *get_config_fn(void);

static sgemm_fn *sgemm;
static const char *name = "missing";

static void choose_kernels(void)
{
    setenv("OPENBLAS_NUM_THREADS", "1", 1);
    unsetenv("OPENBLAS_CORETYPE");
#ifdef __x86_64__
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        setenv("OPENBLAS_CORETYPE", "SkylakeX", 1);
    else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        setenv("OPENBLAS_CORETYPE", "Haswell", 1);
#endif
}

bool openblas_open(char *error, size_t error_size)
{
    static const char *const files[] = {"libopenblas.so.0", "libopenblas.so", "libopenblasp.so.0", "libopenblas.dylib"};
    if (sgemm)
        return true;
    choose_kernels();
    void *library = NULL;
    for (size_t i = 0; i < sizeof files / sizeof *files && !library; i++)
        library = dlopen(files[i], RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(error, error_size, "OpenBLAS is missing: no %s in the library path", files[0]);
        return false;
    }
    /* Symbols are cast through void **, because ISO C has no cast from void * to a function pointer. */
    sgemm_fn *found_sgemm;
    set_num_threads_fn *set_num_threads;
    get_config_fn *get_config;
    *(void **)&found_sgemm = dlsym(library, "cblas_sgemm");
    *(void **)&set_num_threads = dlsym(library, "openblas_set_num_threads");
    *(void **)&get_config = dlsym(library, "openblas_get_config");
    if (!found_sgemm || !set_num_threads || !get_config) {
        snprintf(error, error_size, "OpenBLAS is missing: the library found lacks %s",
                 !found_sgemm ? "cblas_sgemm" : !set_num_threads ? "openblas_set_num_threads" : "openblas_get_config");
        dlclose(library);
        return false;
    }
    set_num_threads(1);
    name = get_config();
    sgemm = found_sgemm; /* the library stays open until the process ends: it may have started threads */
    return true;
}

const char *openblas_name(void)
{
    return name;
}

static float *numbers(int64_t count)
{
    float *x = malloc((size_t)count * sizeof *x);
    for (int64_t i = 0; x && i < count; i++)
        x[i] = (float)(i % 251) / 251.0f - 0.5f;
    return x;
}

double openblas_sgemm_gflops(int64_t M, int64_t N, int64_t K, double seconds)
{
    const int64_t most = 1 << 20;
    if (!sgemm || M < 1 || N < 1 || K < 1 || M > most || N > most || K > most)
        return NAN;
    float *A = numbers(M * K), *B = numbers(N * K), *C = numbers(M * N);
    double best = INFINITY;
    if (A && B && C) {
        const double start = term_now();
        for (int64_t call = 0; call < 3 || term_now() - start < seconds; call++) {
            const double before = term_now();
            sgemm(ROW_MAJOR, NO_TRANSPOSE, TRANSPOSE, (int)M, (int)N, (int)K, 1.0f, A, (int)K, B, (int)K, 0.0f, C, (int)N);
            best = fmin(best, term_now() - before);
        }
    }
    free(A);
    free(B);
    free(C);
    return isinf(best) ? NAN : 2e-9 * (double)M * (double)N * (double)K / best;
}
