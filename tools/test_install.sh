#!/bin/sh
# What `make install` installs works from wherever it was put: pkg-config finds it there, and the first example in C builds against it and runs.
#
#   tools/test_install.sh BUILD
build=$1
here=$(cd "$(dirname "$0")/.." && pwd)
command -v pkg-config >/dev/null 2>&1 || { echo "SKIP install: there is no pkg-config"; exit 77; }
prefix=$(mktemp -d) || exit 1
trap 'rm -rf "$prefix"' EXIT

case=what_is_installed_builds_and_runs_the_example
fail() {
    echo "FAIL $case: $1"
    exit 1
}

cmake --install "$build" --prefix "$prefix" >"$prefix/log" 2>&1 || fail "$(tail -n 3 "$prefix/log")"
PKG_CONFIG_PATH=$(dirname "$(find "$prefix" -name mok.pc)")
export PKG_CONFIG_PATH
flags=$(pkg-config --cflags --libs mok) || fail "pkg-config does not know mok"
cc "$here/examples/forward.c" $flags -lpthread -lm -Wl,-rpath,"$(pkg-config --variable=libdir mok)" -o "$prefix/forward" 2>"$prefix/log" || fail "$(cat "$prefix/log")"
"$prefix/forward" cpu >"$prefix/log" 2>&1 || fail "$(cat "$prefix/log")"
echo "PASS $case"

case=the_tool_fails_if_its_output_cannot_be_written
for words in info "plan --model glm-5.2 --json" "doctor --json" "trace --hidden 64 --intermediate 64 --shared 0 --tokens 8"; do
    "$prefix/bin/mok" $words >/dev/full 2>"$prefix/log" && fail "mok $words ended with 0"
    grep -q "cannot write .*: No space left on device" "$prefix/log" || fail "mok $words: $(cat "$prefix/log")"
done
echo "PASS $case"
