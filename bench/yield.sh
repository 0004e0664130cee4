#!/bin/sh
# Builds and runs the bench of yields (bench/yield.cu) against the library in $MOK_BUILD (default build-gpu), on one GPU. Arguments go to the program.
set -e
cd "$(dirname "$0")/.."
build=$(cd "${MOK_BUILD:-build-gpu}" && pwd)
${NVCC:-nvcc} -std=c++17 -O2 -gencode "arch=compute_${MOK_ARCHS:-90a},code=sm_${MOK_ARCHS:-90a}" -Iinclude bench/yield.cu -o "$build/yield" -L"$build" -lmok -Xlinker "-rpath=$build"
MOK_COMMIT=${MOK_COMMIT:-$(git rev-parse --short=12 HEAD 2>/dev/null || true)} exec "$build/yield" "$@"
