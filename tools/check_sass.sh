#!/bin/sh
# Compiles every kernel for sm_90a and fails on what costs speed silently: register spills, a local stack, and ptxas warnings that
# wgmma was serialised or setmaxnreg ignored (C75xx). One PASS, FAIL or SKIP line for each file. Exit 77 without nvcc.
cd "$(dirname "$0")/.." || exit 1
nvcc=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
if ! command -v "$nvcc" >/dev/null 2>&1; then
    echo "SKIP check_sass: no nvcc"
    exit 77
fi
log=$(mktemp) && trap 'rm -f "$log"' EXIT
status=0
check() {
    if ! "$nvcc" -std=c++17 -O3 -fmad=false -gencode arch=compute_90a,code=sm_90a -Iinclude -Isrc -Xptxas -v -cubin "$1" -o /dev/null >"$log" 2>&1; then
        sed 's/^/  /' "$log" | tail -n 30
        echo "FAIL check_sass $1: does not compile" && status=1 && return
    fi
    kernels=$(grep -c 'Compiling entry function' "$log")
    bad=$(grep -B2 -E '[1-9][0-9]* bytes (stack frame|spill)|C75[0-9][0-9]|erialized' "$log")
    if [ -n "$bad" ]; then
        echo "$bad" | sed 's/^/  /'
        echo "FAIL check_sass $1" && status=1
    else
        echo "PASS check_sass $1 ($kernels kernels)"
    fi
}
for file in src/cuda/kernel/*.cu bench/*.cu; do
    grep -q cublas_v2.h "$file" && [ ! -f "$(dirname "$nvcc")/../include/cublas_v2.h" ] && echo "SKIP check_sass $file: no cuBLAS header" && continue
    check "$file"
done
exit $status
