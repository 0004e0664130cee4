#!/bin/sh
# Compiles examples/mpi_layer.c against a build folder and runs it over 2 and 3 processes on the cpu backend. Installs Open MPI where it is
# missing, saying so. The last line counts.
build=${1:-build}
cd "$(dirname "$0")/.." || exit 1
if ! command -v mpirun >/dev/null 2>&1 || ! command -v mpicc >/dev/null 2>&1; then
    if ! command -v apt-get >/dev/null 2>&1; then
        echo "SKIP mpi_layer: there is no MPI, and no apt-get to install it with"
        echo "0 passed, 0 failed, 1 skipped"
        exit 0
    fi
    echo "Installing what is missing: openmpi-bin libopenmpi-dev"
    sudo=""
    [ "$(id -u)" = 0 ] || sudo=sudo
    $sudo apt-get update -q >/dev/null && $sudo apt-get install -y -q --no-install-recommends openmpi-bin libopenmpi-dev >/dev/null
fi
passed=0 failed=0
as_root=""
[ "$(id -u)" = 0 ] && as_root=--allow-run-as-root
if mpicc -std=c11 -O2 -Wall -Wextra -Iinclude examples/mpi_layer.c -L"$build" -lmok -Wl,-rpath,"$(cd "$build" && pwd)" -o "$build/mpi_layer"; then
    for n in 2 3; do
        if timeout 120 mpirun $as_root --oversubscribe -n $n "$build/mpi_layer"; then
            echo "PASS mpi_layer_$n" && passed=$((passed + 1))
        else
            echo "FAIL mpi_layer_$n" && failed=$((failed + 1))
        fi
    done
else
    echo "FAIL mpi_layer: does not compile" && failed=1
fi
echo "$passed passed, $failed failed, 0 skipped"
[ "$failed" -eq 0 ]
