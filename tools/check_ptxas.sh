#!/bin/sh
# Runs nvcc (with -Xptxas -v) and refuses what makes a kernel silently slow: spilled registers, wgmma that ptxas serialises (C75xx), and
# stack frames.
#
#   tools/check_ptxas.sh LOG nvcc ARGUMENTS…     runs it, keeps its output in LOG
#   tools/check_ptxas.sh LOG                     looks at a LOG that is there
#
# Prints nothing if all is well; else the lines that are not. Exit status 0, or 1, or nvcc's.
log=$1
shift
if [ $# -gt 0 ]; then
    "$@" >"$log" 2>&1
    status=$?
    # What ptxas says with -v is for the log only; the rest is for people.
    grep -v '^ptxas info\|bytes stack frame\|^$\|^[a-z_]*\.cu$' "$log"
    [ $status -eq 0 ] || exit $status
fi
bad=$(awk '
    /Compiling entry function/ { name = $0; sub(/.*function ['"'"']/, "", name); sub(/['"'"'].*/, "", name) }
    /bytes stack frame/ && !/ 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads/ { sub(/^ */, ""); print "  " name ": " $0 }
    /\(C75[0-9][0-9]\)/ { print "  " $0 }
' "$log")
[ -z "$bad" ] && exit 0
printf 'ptxas: spills, stack frames or serialised wgmma (%s):\n%s\n' "$log" "$bad" >&2
exit 1
