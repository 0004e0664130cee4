#!/bin/bash
# One part of what is measured and proved on GPUs, by one command:
#
#   bash bench/run_gpu.sh PART [OUT]           records and logs go to OUT (default bench/results/); the last line counts steps
#   bash bench/run_gpu.sh list                 the parts
#   bash bench/run_gpu.sh PART OUT --dry       the same steps on the CPU with small shapes, to try the script; what needs a GPU is a skip
#
# PART is N-NAME: N GPUs (1, 2, 4 or 8), and what to do with them, e.g. 1-right, 2-forward, 8-link. Every part builds what it needs in $MOK_BUILD (default
# build-gpu; for this machine's GPU only) and takes at most ten minutes, most of them three or four. A step that fails does not keep the next from running.
#
#   MOK_COMMIT   commit for the records, where there is no .git        MOK_ARCHS    CUDA architectures (default 90a)
#   MOK_PYTHON   a Python with PyTorch (default python3)               MOK_SHAPES   of bench_layer.py (default: those of the goals)
#   MOK_OTHER    a file for bench_layer.py --other-baseline            MOK_PAIRS    rounds of bench_layer.py (default 20)
#   MOK_BUILD_UNBOUNDED   1-waits: a build with -DMOK_UNBOUNDED_WAITS=ON; given, neither it nor the one in $MOK_BUILD is built there
cd "$(dirname "$0")/.." || exit 1

part=${1:-list} out=${2:-bench/results} dry=""
[ "${3:-}" = --dry ] && dry=1
gpus=${part%%-*} what=${part#*-}
mkdir -p "${MOK_BUILD:-build-gpu}" || exit 1
build=$(cd "${MOK_BUILD:-build-gpu}" && pwd) python=${MOK_PYTHON:-python3} pairs=${MOK_PAIRS:-20}
goals=kimi-k2.7-code-share,glm-5.2-share,deepseek-v4-pro-share,qwen3.5-397b-a17b-share,qwen3-30b-a3b,mixtral-8x7b
shapes=${MOK_SHAPES:-$goals}
export MOK_LIBRARY=$build/libmok.so PYTHONPATH=$PWD/python${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=4 PYTHONUNBUFFERED=1
export MOK_COMMIT=${MOK_COMMIT:-$(git rev-parse --short=12 HEAD 2>/dev/null)}

# --- steps ----------------------------------------------------------------------------------------------------------------
started=$SECONDS count=0 passed=0 failed=0 skipped=0 summary=""

say() { printf '[%3d s] %s\n' $((SECONDS - started)) "$*"; }

# note NAME RESULT SECONDS
note() {
    summary="$summary${summary:+,}\n  {\"step\": \"$1\", \"result\": \"$2\", \"seconds\": $3}"
    printf "{\"part\": \"$part\", \"gpus\": $gpus, \"commit\": \"$MOK_COMMIT\", \"dry\": ${dry:-0}, \"steps\": [$summary\n]}\n" >"$out/run-$part.json"
}

# step NAME SECONDS COMMAND...: with a limit; output to OUT/log-PART/NAME.log, its last lines here.
step() {
    local name=$1 limit=$2 begin=$SECONDS status
    shift 2
    count=$((count + 1))
    say "step $count: $name (at most $limit s)"
    timeout -k 10 "$limit" "$@" >"$logs/$name.log" 2>&1
    status=$?
    case $status in
    0) passed=$((passed + 1)) && set -- PASS ;;
    77) skipped=$((skipped + 1)) && set -- SKIP ;;
    124 | 137) failed=$((failed + 1)) && set -- "FAIL (out of time)" ;;
    *) failed=$((failed + 1)) && set -- "FAIL ($status)" ;;
    esac
    [ "${1%% *}" = FAIL ] && grep -E 'Error|error:|FAIL|differ|exit code' "$logs/$name.log" | grep -vE 'ChildFailedError|error_file' | head -n 12 | cut -c1-400 | sed 's/^/  ! /'
    grep -vE '^\s*$|^(\[rank[0-9]+\]:)?[WE][0-9]{4} |DEBUG|\*{20}|^ *File |^Traceback|^ +[~^]+$' "$logs/$name.log" | tail -n "${LINES_SHOWN:-6}" | cut -c1-260 | sed 's/^/    /'
    say "$1 $name, $((SECONDS - begin)) s"
    note "$name" "${1%% *}" $((SECONDS - begin))
}

skip() {
    count=$((count + 1)) skipped=$((skipped + 1))
    say "SKIP $1: $2"
    note "$1" SKIP 0
}

# gpu_step: a step that a dry run has to leave out.
gpu_step() { if [ -n "$dry" ]; then skip "$1" "needs a GPU"; else step "$@"; fi; }

# --- building -------------------------------------------------------------------------------------------------------------
build_targets() {
    local cuda=ON
    [ -n "$dry" ] && cuda=OFF
    cmake -S . -B "$build" -DCMAKE_BUILD_TYPE=Release -DMOK_CUDA=$cuda -DMOK_CUDA_ARCHS="${MOK_ARCHS:-90a}" -DMOK_CUDA_LINES="${MOK_LINES:-OFF}" -DMOK_UNBOUNDED_WAITS="${unbounded:-OFF}" -DMOK_WERROR=OFF &&
        cmake --build "$build" -j "$(nproc)" --target "$@"
}
build() { LINES_SHOWN=1 step build 200 bash -c 'build_targets "$@"' build "$@"; }

# --- what steps run -------------------------------------------------------------------------------------------------------
# bench NAME SECONDS ARGUMENTS...: bench_layer.py on all GPUs of the part; records to OUT/NAME.json
bench() {
    local name=$1 limit=$2 launcher=("$python")
    shift 2
    [ "$gpus" -gt 1 ] && launcher=("$python" -m torch.distributed.run --standalone "--nproc-per-node=$gpus")
    local device=(--device cuda --pairs "$pairs")
    [ -n "$dry" ] && device=(--device cpu --scale 32 --pairs 2 --warmup 1)
    # Other programs need not cope with a rank that receives nothing.
    [ -n "${MOK_OTHER:-}" ] && [[ " $* " != *one-rank* ]] && device+=(--other-baseline "$MOK_OTHER")
    LINES_SHOWN=40 step "$name" "$limit" "${launcher[@]}" bench/bench_layer.py "${device[@]}" --json "$out/$name.json" --png "$out/$name.png" "$@"
}

json_to() { # FILE COMMAND...
    local file=$1
    shift
    "$@" >"$file" && echo "$(wc -c <"$file") bytes to $file"
}

# mok NAME SECONDS ARGUMENTS...: the tool, as JSON to OUT/NAME.json
mok() {
    local name=$1 limit=$2
    shift 2
    gpu_step "$name" "$limit" bash -c 'json_to "$@"' json "$out/$name.json" "$build/mok" "$@" --json
}

sanitizer() { # NAME SECONDS TOOL TEST...: kernels of the small shapes
    local name=$1 limit=$2 tool=$3
    shift 3
    gpu_step "$name" "$limit" env MOK_TEST_QUICK=1 compute-sanitizer --tool "$tool" --error-exitcode 9 "$@"
}

train() { # NAME SECONDS RANKS ARGUMENTS...
    local name=$1 limit=$2 ranks=$3 launcher=("$python") size=(--device cuda)
    shift 3
    [ "$ranks" -gt 1 ] && launcher=("$python" -m torch.distributed.run --standalone "--nproc-per-node=$ranks")
    [ -n "$dry" ] && size=(--device cpu --steps 3 --hidden 64 --intermediate 64 --batch 2 --context 32 --layers 1)
    step "$name" "$limit" "${launcher[@]}" examples/train_moe.py "${size[@]}" --json "$out/$name.json" --plot "" "$@"
}

run_pytest() { # NAME SECONDS ARGUMENTS...
    local name=$1 limit=$2 variables=(MOK_TEST_DEVICE=cuda)
    shift 2
    [ -n "$dry" ] && variables=(MOK_TEST_DEVICE=cpu MOK_TEST_PROCESSES="$gpus")
    LINES_SHOWN=25 step "$name" "$limit" env "${variables[@]}" "$python" -m pytest -q -rs --tb=short "$@"
}

# --- parts ----------------------------------------------------------------------------------------------------------------
# One GPU.
part_1_right() {
    build mok mok_tool test_gpu_layer test_gpu_rows test_gpu_mx
    gpu_step gpu_rows 100 "$build/test_gpu_rows"
    gpu_step gpu_tests 450 "$build/test_gpu_layer"
    gpu_step gpu_mx 60 "$build/test_gpu_mx"
}
# Where kernels stand, if layers in MXFP8 do not end.
part_1_hang() {
    local passes
    export MOK_LINES=ON
    build mok_tool
    for passes in staged fused; do
        LINES_SHOWN=80 gpu_step "where-$passes" 120 env MOK_TIMEOUT_MS=5000 MOK_FORWARD=$passes MOK_BACKWARD=$passes "$python" tools/gpu_where.py --after 25 --keep "$out/gpu-$passes.dump" -- \
            "$build/mok" check --backend cuda --dtype mxfp8 --hidden 256 --intermediate 64 --experts 4 --topk 2 --tokens 120 --ranks 1
    done
}
part_1_sanitizer() {
    build test_gpu_layer
    sanitizer memcheck 200 memcheck "$build/test_gpu_layer" D1_bits_over_ranks_ring_minibatch_tiles_and_kernels
    sanitizer synccheck 200 synccheck "$build/test_gpu_layer" S6_widths_that_are_multiples_of_64_only
}
part_1_torch() {
    build mok
    run_pytest graphs 150 tests/torch/test_rows.py -k "A3 or D1"
    run_pytest torch 380 tests/torch --deselect tests/torch/test_programs.py -k "not A3 and not train_moe and not bench_layer"
}
part_1_soak() {
    build mok_tool
    mok 1-soak 330 soak --backend cuda --steps 1000000 --seconds 300 --faults 0 --seed "${MOK_TEST_SEED:-1}"
}
part_1_mx() {
    build mok mok_tool test_gpu_layer test_gpu_mx
    gpu_step mx_kernels 60 "$build/test_gpu_mx"
    gpu_step mx_bits 150 "$build/test_gpu_layer" D1_bits_in_mxfp8_over_ranks_ring_minibatch_tiles_and_kernels mxfp8_agrees_with_the_cpu
    LINES_SHOWN=40 gpu_step mx_check 120 "$build/mok" check --backend cuda --dtype mxfp8 --hidden 256 --intermediate 384 --shared 128 --experts 8 --topk 3 --tokens 300 --ranks 1,2,4
    mok 1-soak-mx 100 soak --backend cuda --dtype mxfp8 --steps 1000000 --seconds 60 --faults 0 --processes 0 --seed "${MOK_TEST_SEED:-1}"
    run_pytest mx 200 tests/torch/test_mx.py
}
part_1_train() {
    build mok
    train 1-train_moe 280 1 --layer both
}
part_1_forward() {
    build mok
    bench forward-h200 500 --passes forward --shapes "${MOK_SHAPES:-$goals,kimi-k2.7-code-share-8k}"
}
part_1_backward() {
    build mok
    bench backward-h200 500 --passes backward,train --save all --shapes "$shapes"
}
part_1_tokens() {
    build mok
    bench tokens-h200 500 --passes forward --modes burst --tokens "${TOKENS:-512,1024,2048,4096,8192}" --shapes "$shapes"
}
part_1_mxfp8() {
    build mok
    bench mxfp8-h200 500 --passes forward,train --modes burst --dtype mxfp8 --without-weight-cache --save all --shapes "$shapes"
}
part_1_host() {
    build mok
    LINES_SHOWN=12 run_pytest host_time 200 -s tests/torch/test_overhead.py
}
part_1_stages() {
    build mok_tool
    local model experts tokens
    while read -r model experts tokens; do
        mok "stages-$model" 100 bench --backend cuda --model "$model" --experts "$experts" --shared 0 --tokens "$tokens" --ranks 1 --only layer --repeat 20
    done <<'SHAPES'
kimi-k2.7-code 8 2048
qwen3.5-397b-a17b 10 2048
qwen3-30b-a3b 128 8192
mixtral-8x7b 8 4096
SHAPES
}
part_1_yield() {
    build mok test_gpu_layer
    gpu_step bits 30 "$build/test_gpu_layer" Y1_clusters_that_leave_change_no_bit
    LINES_SHOWN=25 gpu_step yield 90 env MOK_BUILD="$build" bash bench/yield.sh --json "$out/yield-h200.json"
}
# Time follows the rows that there are, not those that there may be: 64 tokens in a workspace for 8,192 beside one for 64.
part_1_live() {
    build mok
    bench live-h200 500 --passes forward,train --modes burst --save all --tokens 64 --capacity 8192 --shapes "$shapes"
}
# Two virtual ranks on one GPU beside one rank with the rows of both.
part_1_virtual() {
    build mok_tool
    local where=()
    [ -n "$dry" ] && where=(--backend cpu --rounds 3 --repeat 3)
    step virtual 500 "$python" bench/virtual.py --mok "$build/mok" --json "$out/virtual-h200.json" "${where[@]}"
}
# What it costs that kernels' waits are bounded.
part_1_waits() {
    local other=${MOK_BUILD_UNBOUNDED:-$build-unbounded} where=()
    [ -n "$dry" ] && where=(--device cpu --scale 32 --starts 2 --rounds 2 --calls 2)
    if [ -z "${MOK_BUILD_UNBOUNDED:-}" ]; then
        build mok
        LINES_SHOWN=1 step build-unbounded 200 env build="$other" unbounded=ON bash -c 'build_targets mok'
    fi
    step waits 400 "$python" bench/waits.py --bounded "$build/libmok.so" --unbounded "$other/libmok.so" --json "$out/waits-h200.json" "${where[@]}"
}
part_1_link() {
    build mok_tool
    mok link-h200-alone 100 bench --backend cuda --only link --ranks 1
    LINES_SHOWN=50 gpu_step link-table 100 "$build/mok" bench --backend cuda --only link --ranks 1
    mok link-h200-virtual 150 bench --backend cuda --only link --ranks 2 --devices 1 --tokens 8192
}

# N GPUs.
part_n_right() {
    build mok test_gpu_layer
    gpu_step threads_bits 150 env MOK_TEST_DEVICES="$gpus" "$build/test_gpu_layer" D1_bits_over_ranks_ring_minibatch_tiles_and_kernels
    gpu_step threads_repeats 100 env MOK_TEST_DEVICES="$gpus" "$build/test_gpu_layer" C3_a_thousand_repeats_have_the_same_bits
    gpu_step threads_unequal 60 env MOK_TEST_DEVICES="$gpus" "$build/test_gpu_layer" Z7_unequal_tokens_some_ranks_without_any
    run_pytest processes 250 tests/torch/test_devices.py -s -k "not F1"
}
part_n_sanitizer() {
    build test_gpu_layer
    export MOK_TEST_DEVICES=$gpus
    sanitizer memcheck 250 memcheck "$build/test_gpu_layer" Z7_unequal_tokens_some_ranks_without_any
    sanitizer synccheck 200 synccheck "$build/test_gpu_layer" Z7_unequal_tokens_some_ranks_without_any
}
part_n_forward() {
    build mok
    bench "forward-h200-x$gpus" 520 --passes forward --modes burst --against-ep1 --shapes "$shapes"
}
part_n_backward() {
    build mok
    bench "backward-h200-x$gpus" 520 --passes train --modes burst --save all --against-ep1 --shapes "$shapes"
}
part_n_tokens() {
    build mok
    bench "tokens-h200-x$gpus" 520 --passes forward --modes burst --tokens "${TOKENS:-512,1024,4096,8192}" --shapes "$shapes"
}
part_n_skew() {
    build mok
    bench "one-rank-h200-x$gpus" 300 --passes forward --modes burst --routing one-rank --against-ep1 --shapes "$shapes"
    bench "zipf-h200-x$gpus" 250 --passes forward --modes burst --routing zipf --against-ep1 --shapes "$shapes"
}
part_n_mxfp8() {
    build mok
    bench "mxfp8-one-rank-h200-x$gpus" 200 --passes forward --modes burst --routing one-rank --dtype mxfp8 --against-ep1 --shapes qwen3.5-397b-a17b-share,kimi-k2.7-code-share
    bench "mxfp8-h200-x$gpus" 350 --passes forward,train --modes burst --save all --dtype mxfp8 --shapes "$shapes"
}
part_n_ring() {
    build mok
    local rows
    for rows in 4352 8704 0; do
        bench "ring-$rows-h200-x$gpus" 180 --passes train --modes burst --save none --ring-rows "$rows" --shapes kimi-k2.7-code-share
    done
}
part_n_link() {
    build mok_tool
    mok "link-h200-x$gpus" 200 bench --backend cuda --only link --ranks "$gpus" --repeat 50
    mok "link-h200-x$gpus-processes" 200 bench --backend cuda --only link --ranks "$gpus" --processes --repeat 50 --row-bytes 14336,4096
    LINES_SHOWN=90 gpu_step link-table 150 "$build/mok" bench --backend cuda --only link --ranks "$gpus" --repeat 20
}
part_n_stages() {
    build mok_tool
    mok "stages-kimi-x$gpus" 150 bench --backend cuda --model kimi-k2.7-code --experts $((6 * gpus)) --shared 0 --tokens 2048 --ranks "$gpus" --only layer
    mok "stages-qwen3.5-x$gpus" 150 bench --backend cuda --model qwen3.5-397b-a17b --experts $((8 * gpus)) --shared 0 --tokens 2048 --ranks "$gpus" --only layer
}
part_n_trace() {
    build mok_tool
    gpu_step trace 100 "$build/mok" trace --backend cuda --model kimi-k2.7-code --experts $((6 * gpus)) --shared 0 --tokens 2048 --ranks "$gpus" --devices "$gpus" --pass forward \
        --repeat 5 --svg "$out/forward-h200-x$gpus.svg" --chrome "$out/forward-h200-x$gpus-trace.json"
}
part_n_example() {
    build mok
    train "train_moe-x$gpus" 280 "$gpus" --layer both --ep "$gpus"
    train "train_moe-x$gpus-ep1" 200 "$gpus" --layer mok --ep 1
    step same_losses 20 "$python" - "$out/train_moe-x$gpus.json" "$out/train_moe-x$gpus-ep1.json" <<'PYTHON'
import json, sys
ep, alone = (json.load(open(path))["mok"] for path in sys.argv[1:])
same = sum(a == b for a, b in zip(ep["losses"], alone["losses"]))
print(f"the same loss in {same} of {len(alone['losses'])} steps; first losses {ep['losses'][0]!r} and {alone['losses'][0]!r}")
sys.exit(ep["losses"][0] != alone["losses"][0])
PYTHON
}
part_n_faults() {
    build mok mok_tool
    run_pytest dead_rank 200 tests/torch/test_devices.py -s -k F1
    gpu_step doctor 30 "$build/mok" doctor
    step mpi 200 bash -c run_mpi
}
run_mpi() {
    command -v mpirun >/dev/null && command -v mpicc >/dev/null || return 77
    mpicc -std=c11 -O2 -Iinclude examples/mpi_layer.c -L"$build" -lmok -Wl,-rpath,"$build" -o "$build/mpi_layer" &&
        mpirun --allow-run-as-root --oversubscribe -n "$gpus" "$build/mpi_layer" $([ -n "$dry" ] || echo cuda)
}

# --- here we go -----------------------------------------------------------------------------------------------------------
parts() { declare -F | sed -n 's/^declare -f part_\([1n]\)_\(.*\)$/\1-\2/p' | sed 's/^n-/N-/'; }

[ "$gpus" = 1 ] && function=part_1_$what || function=part_n_$what
if ! [[ $gpus =~ ^[1-9][0-9]*$ ]] || ! declare -F "$function" >/dev/null; then
    [ "$part" = list ] || echo "there is no part $part"
    echo "parts, N being 2, 4 or 8:" $(parts)
    [ "$part" = list ]
    exit
fi
logs=$out/log-$part
mkdir -p "$logs" || exit 1
out=$(cd "$out" && pwd) logs=$out/log-$part
export build dry gpus out
export -f build_targets run_mpi json_to
[ -n "$dry" ] || nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.draw --format=csv,noheader | sed 's/^/    /'
$function
say "$part: $passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
