#!/bin/sh
# `mok soak`: up to 10,000 random, checked steps with faults in between, at most SECONDS (default 300) of them. The last line counts it as one case.
build=${1:-build}
seconds=${2:-300}
if "$build/mok" soak --steps 10000 --processes 400 --seconds "$seconds" --seed "${MOK_TEST_SEED:-1}"; then
    echo "PASS soak"
    echo "1 passed, 0 failed, 0 skipped"
else
    echo "FAIL soak"
    echo "0 passed, 1 failed, 0 skipped"
    exit 1
fi
