#!/bin/sh
# Runs the tests of a build folder and ends with one line that counts the cases: "N passed, N failed, N skipped".
# Every test program prints one PASS, FAIL or SKIP line per case; a program that dies counts as one failed case more.
build=$1
shift
log=$build/test.log
ctest --test-dir "$build" -V -j "${JOBS:-$(nproc)}" "$@" >"$log" 2>&1
ctest_status=$?
# ctest -V prefixes every line of test number 12 with "12: "
cases=$(sed -n 's/^[0-9]*: \(PASS\|FAIL\|SKIP\)\b/\1/p' "$log")
passed=$(printf '%s\n' "$cases" | grep -c '^PASS')
failed=$(printf '%s\n' "$cases" | grep -c '^FAIL')
skipped=$(printf '%s\n' "$cases" | grep -c '^SKIP')
if [ "$ctest_status" -ne 0 ]; then
    grep -E '^[0-9]+: (FAIL|seed|.*ERROR|.*WARNING|  /|  [a-z])|\*\*\*|tests failed' "$log" | head -200
    echo "The whole output is in $log."
    [ "$failed" -eq 0 ] && failed=1
fi
printf '%s\n' "$cases" | grep '^SKIP'
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
