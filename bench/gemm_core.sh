#!/bin/sh
# Builds and runs the grouped GEMM core's GPU check and bench. Arguments go to the program ("quick": Kimi's shapes only).
set -e
cd "$(dirname "$0")/.."
out=${TMPDIR:-/tmp}/mok_gemm_core
${NVCC:-nvcc} -std=c++17 -O3 -fmad=false -gencode arch=compute_90a,code=sm_90a -Isrc bench/gemm_core.cu -o "$out" -lcublas -ldl
exec "$out" "$@"
