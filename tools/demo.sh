#!/bin/sh
# make demo: trains a small MoE language model over 4 ranks, shows that its experts are what learned, and that 1 rank has the same bits.
# Every figure is measured in this run; what does not hold ends it with a sentence and status 1.
#
#   sh tools/demo.sh BUILD      DEMO_STEPS=N for another number of steps
build=$1
mok=$build/mok
steps=${DEMO_STEPS:-400}
again=50 # steps repeated with 1 rank
[ "$steps" -lt "$again" ] && again=$steps
out=$build/demo
began=$(date +%s)

fail() {
    printf '\nDEMO FAILED: %s\n' "$1" >&2
    exit 1
}

# train NAME ARGUMENT...: shows the output and keeps it in $out/NAME.log
train() {
    name=$1
    shift
    printf '$ mok train %s\n' "$*"
    { "$mok" train "$@" || echo "exit status $?"; } | tee "$out/$name.log"
    grep -q '^exit status' "$out/$name.log" && fail "mok train ended with $(grep '^exit status' "$out/$name.log")"
    grep -q '^held-out loss' "$out/$name.log" || fail "mok train did not end with a held-out loss"
}

held_out() { sed -n 's/^held-out loss \([0-9.]*\).*/\1/p' "$out/$1.log"; }
fingerprint() { sed -n 's/^text: .*fingerprint //p' "$out/$1.log"; }
# "step loss-in-hexadecimal" of all lines up to a step
bits() { awk -v last="$2" '$1 == "step" && $2 ~ /^[0-9]+$/ && $2 <= last { print $2, $5 }' "$out/$1.log"; }
holds() { awk "BEGIN { exit !($1) }"; }

[ -x "$mok" ] || fail "there is no $mok: run make first"
mkdir -p "$out" || fail "cannot make the folder $out"

printf '== 1. A mixture-of-experts language model learns from the sources of MoK, over 4 ranks ==\n\n'
train experts --ranks 4 --steps "$steps" --csv "$out/loss.csv"

printf '\n== 2. The same with every route dropped: what the model learns without its experts ==\n\n'
train dropped --ranks 4 --steps "$steps" --drop-routes

printf '\n== 3. The first %s steps again, with 1 rank ==\n\n' "$again"
train one --ranks 1 --steps "$again" --csv "$out/loss1.csv"

printf '\n== What came out ==\n\n'
[ "$(fingerprint experts)" = "$(fingerprint dropped)" ] && [ "$(fingerprint experts)" = "$(fingerprint one)" ] ||
    fail "the sources changed while the demo ran, so its runs cannot be compared: run it again"

with=$(held_out experts) without=$(held_out dropped)
first=$(awk '$1 == "step" && $2 == 1 { print $4 }' "$out/experts.log")
printf 'loss of the first step       %s nats per byte (knowing nothing: ln 256 = %s)\n' "$first" "$(awk 'BEGIN { printf "%.4f", log(256) }')"
printf 'held-out loss with experts   %s nats per byte after %s steps\n' "$with" "$steps"
printf 'held-out loss without        %s nats per byte after %s steps\n' "$without" "$steps"
holds "$with < 2.6" || fail "the held-out loss is $with nats per byte: it should be below 2.6"
holds "$with < $without - 0.25" || fail "dropping all routes costs less than 0.25 nats per byte: the experts did not learn enough"

bits experts "$again" >"$out/bits4" && bits one "$again" >"$out/bits1"
count=$(grep -c ' -*0x' "$out/bits1")
[ "$count" -ge 2 ] || fail "the 1-rank run printed $count losses in hexadecimal"
printf '\nlosses of the same steps, bit for bit:\n\n  step  with 4 ranks          with 1 rank\n'
paste -d ' ' "$out/bits4" "$out/bits1" | awk '{ printf "%6s  %-20s  %-20s  %s\n", $1, $2, $4, ($0 == $1 " " $2 " " $1 " " $2) ? "same" : "DIFFERENT" }'
cmp -s "$out/bits4" "$out/bits1" || fail "the losses of 4 ranks and 1 rank differ"
# The CSV files have all steps, in decimals that read back as the same doubles; the held-out column may have other steps.
losses() { awk -F , -v last="$again" 'NR > 1 && $1 >= 1 && $1 <= last { print $1, $2 }' "$out/$1.csv"; }
losses loss >"$out/losses4" && losses loss1 >"$out/losses1"
[ "$(grep -c ' [0-9]' "$out/losses1")" = "$again" ] || fail "the 1-rank run wrote $(grep -c ' [0-9]' "$out/losses1") losses, not $again"
cmp -s "$out/losses4" "$out/losses1" || fail "a loss of 4 ranks and 1 rank differs that was not shown"
printf '\n4 ranks and 1 rank have the same bits in all of the first %s losses. The demo took %s seconds.\n' "$again" "$(($(date +%s) - began))"
