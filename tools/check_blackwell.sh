#!/bin/sh
# Compiles tests/cuda/*.cu, kernels on Blackwell's core that are not part of the library, for sm_100a and sm_103a: no spills, no stack, and in the
# machine code the instructions that they are about (tools/kernel_report.py). One PASS, FAIL or SKIP line for each. Exit 77 without nvcc.
cd "$(dirname "$0")/.." || exit 1
nvcc=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
if ! command -v "$nvcc" >/dev/null 2>&1; then
    echo "SKIP check_blackwell: no nvcc"
    exit 77
fi
out=$(mktemp -d) && trap 'rm -rf "$out"' EXIT
status=0
for file in tests/cuda/*.cu; do
    for arch in 100a 103a; do
        image=$out/sm_$arch.cubin
        if sh tools/check_ptxas.sh "$out/log" "$nvcc" -std=c++17 -O3 -fmad=false -gencode "arch=compute_$arch,code=sm_$arch" -Iinclude -Isrc -Xptxas -v -cubin "$file" -o "$image"; then
            echo "PASS check_blackwell $file, sm_$arch"
        else
            echo "FAIL check_blackwell $file, sm_$arch" && status=1 && continue
        fi
        python3 tools/kernel_report.py --part --image "$image"
        [ $? -eq 1 ] && status=1
    done
done
exit $status
