#!/usr/bin/env python3
"""Do the emulator tests notice a missing wait, fence, arrive or commit?

Makes one mutant of src/cuda for every call of one (that call left out), and for a list of wrong swizzle bits, descriptor bits,
parities, counts and needs; runs the emulator tests with each until one fails. A mutant that no test notices survives: it must be
listed in tools/mutate_survivors.txt with the reason why it is redundant, or the tests are too weak.

    tools/mutate.py --build BUILD [--seeds N] [--only PATTERN] [--sample N --seed S] [--minutes M] [--trust] [--list]

--seed chooses the sample. The tests' own seeds are 1 to N (--seeds) whatever the sample is, so that a mutant has one verdict.

All mutants are compiled at once: each call becomes `mutant(n) ? nothing : call`, and MOK_MUTANT=n switches one on. BUILD is a
CMake build folder with the emulator (its libraries are linked); the mutants' sources and programs go to BUILD/mutants.
The last line counts: "N passed, N failed, N skipped" (killed or explained, unexplained, out of time)."""
import argparse, concurrent.futures, os, random, re, shutil, subprocess, sys, time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TESTS = ["gemm", "gemm_scaled_sm100", "schedule", "dispatch", "dispatch_sm100", "mx", "mx_layer", "mx_layer_sm100", "mx_wgrad_sm100", "forward", "forward_sm100", "trace", "backward", "backward_sm100"]  # tests/emu/test_<name>.cpp; --tests

# Which of them run a file, the quickest to notice first. The longest beginning of its name counts.
RUN_BY = {
    "": "schedule forward",
    "arch/": "gemm",
    "gemm/": "gemm forward mx_layer",
    "gemm/broad": "forward",
    "gemm/gemm": "gemm forward forward_sm100",
    "gemm/pair": "gemm_scaled_sm100 mx_wgrad_sm100 gemm forward_sm100 backward_sm100 mx_layer_sm100",
    "kernel/backward": "backward backward_sm100",
    "kernel/forward": "forward forward_sm100 mx_layer",
    "kernel/link": "",  # measures, and checks itself
    "kernel/mx": "mx",
    "layout/": "forward",
    "layout/pieces": "schedule",
    "stage/backward": "backward backward_sm100 mx_layer mx_layer_sm100",
    "stage/backward_sm100": "mx_wgrad_sm100 backward_sm100 mx_layer_sm100",
    "stage/call": "schedule trace forward",
    "stage/forward": "forward forward_sm100 mx_layer mx_layer_sm100",
    "stage/mx": "mx mx_wgrad_sm100",
    "stage/mx_epilogue": "mx_layer mx_layer_sm100",
    "stage/s1_": "dispatch dispatch_sm100 mx_layer forward mx_layer_sm100",
    "stage/s2_gate_up_bwd": "backward",
    "stage/s4_down_bwd": "backward",
    "stage/s5_": "forward",
    "stage/s5_combine_bwd": "backward",
    "stage/stage": "dispatch schedule forward",
    "stage/weights": "backward backward_sm100",
    "stage/wgrad": "mx_wgrad_sm100 backward backward_sm100 mx_layer_sm100",
    "stage/yield": "forward forward_sm100 backward backward_sm100",
}

# Calls that are left out, where they stand as a statement of their own.
CALLS = re.compile(r"\b(?:wait_(?:mbar|flag|counter)\w*|mbar_arrive\w*|fence_\w+|barrier_\w+|bulk_commit|bulk_wait(?:_read)?<\d+>|wgmma_fence|wgmma_commit"
                   r"|wgmma_wait<\d+>|tcgen05_(?:commit|fence)\w+|tmem_wait_store|sync_warp|release_stage|give_up_columns|flag_(?:store|add)_release\w*|\w+\.(?:release|wait_all|wait_all_but_last|wait_operands))\(")
NO_CALLS = ("arch/", "host/", "layout/")  # bodies of the instructions; host code; plain C
FUNCTION = re.compile(r"^.*\bMK_(?:DEVICE|MEMBER|KERNEL|ENTRY)\b.*?\b(\w+|operator\(\))\((?!\w+\) MK_)", re.M)  # the head of one

# Wrong values: file (below src/cuda, or src/layout), the text just before an expression, the expression, what it may wrongly be.
WRONG = [
    ("gemm/mma.cuh", "return ", "kOperandLayout", ["kOperandLayout ^ 1ull << 62", "kOperandLayout ^ 1ull << 63", "kOperandLayout ^ 1ull << 37",
                                                   "kOperandLayout ^ 1ull << 49"]),
    ("gemm/mma.cuh", "r[m], ", "da + step * kNextStep<A> + m * next_block", ["da + 2 * step * kNextStep<A> + m * next_block",
                                                                            "da + step * kNextStep<A> + m * next_block / 2", "da + step * kNextStep<A>"]),
    ("gemm/mma.cuh", "m * next_block, ", "db + step * kNextStep<B>", ["db", "db + 2 * step * kNextStep<B>"]),
    ("gemm/mma.cuh", "db + step * kNextStep<B>, ", "!first || step > 0", ["true", "!first"]),
    ("gemm/mma.cuh", "smem_addr(s.a[at.slot]) + ", "first_row * kRowBytes", ["0"]),
    ("gemm/mma.cuh", "rank < ", "Tile::cluster", ["1"]),
    ("gemm/mma.cuh", "at.skip(", "(uint32_t)task.num_k_blocks", ["0"]),
    ("gemm/mma.cuh", "first_row + ", "warp % 4 * 16", ["0"]),
    ("gemm/epilogue.cuh", "(2 * j + in_piece) ^ ", "(in_row % 8)", ["0"]),
    ("gemm/epilogue.cuh", "(piece ^ ", "(row % 8)", ["0"]),
    ("gemm/epilogue.cuh", "half = out.staging + ", "turn % 2", ["0"]),
    ("gemm/epilogue.cuh", "to[i] = ", "r < (uint32_t)task.num_rows", ["r <= (uint32_t)task.num_rows", "true"]),
    ("gemm/epilogue.cuh", "if (", "col >= rows.cols", ["col > rows.cols", "false"]),
    ("gemm/epilogue.cuh", "row < (uint32_t)task.num_rows && ", "col < cols", ["col <= cols", "true"]),
    ("gemm/epilogue.cuh", "visit(row, col, ", "row < (uint32_t)task.num_rows", ["row <= (uint32_t)task.num_rows", "true"]),
    ("stage/s4_down_bwd.cuh", "return ", "row < (uint32_t)task.num_rows", ["row <= (uint32_t)task.num_rows", "true"]),
    ("stage/s4_down_bwd.cuh", "distance < ", "8", ["4"]),
    ("stage/s4_down_bwd.cuh", "if (n + ", "kAhead < count", ["kAhead + 2 < count"]),
    ("gemm/load.cuh", "s.empty[at.slot]), ", "at.parity ^ 1", ["at.parity"]),
    ("gemm/load.cuh", "s.task_empty[at.slot]), ", "at.parity ^ 1", ["at.parity"]),
    ("gemm/load.cuh", "x, task.row + ", "(int32_t)first", ["0"]),
    ("gemm/load.cuh", "tma_load_2d_multicast(a + ", "first * kRowBytes", ["0"]),
    ("gemm/load.cuh", "full, ", "(1 << Tile::cluster) - 1", ["1 << cluster_rank()"]),
    ("gemm/load.cuh", "(full, ", "kStageBytes<Tile>", ["kStageBytes<Tile> - 16", "kStageBytes<Tile> + 16"]),
    ("gemm/load.cuh", "in.b_high, x, ", "task.col + in.b_high_row", ["task.col"]),
    ("gemm/tile.cuh", "s.empty[i]), ", "kWarpsPerTile<Tile> * Tile::cluster", ["kWarpsPerTile<Tile> * Tile::cluster - 1", "kWarpsPerTile<Tile> * Tile::cluster + 1"]),
    ("gemm/tile.cuh", "s.task_empty[i]), ", "(kTaskReaders + more_readers) * Tile::cluster",
     ["(kTaskReaders + more_readers) * Tile::cluster - 1", "(kTaskReaders + more_readers) * Tile::cluster + 1"]),
    ("gemm/tile.cuh", "parity ^= ", "slot / Slots & 1", ["0"]),
    ("stage/s1_dispatch.cuh", "reinterpret_cast<const uint32_t *>(from) + ", "atom", ["0"]),
    ("stage/s1_dispatch.cuh", "cell = ", "(cell & 0xffff) | (zeros & 0xffff0000u)", ["cell"]),
    ("stage/s1_dispatch.cuh", "source_of(what, d, lane) + ", "r.dims.hidden", ["0"]),
    ("stage/s1_dispatch.cuh", "source_row = ", "shuffle((uint32_t)d.from, owner)", ["row"]),
    ("stage/s1_dispatch.cuh", "store(scale_cell(what, ", "ahead(row, i)", ["row"]),
    ("stage/mx_epilogue.cuh", "both = scale | ", "shuffle_xor((uint32_t)scale, 4) << 8", ["scale << 8"]),
    ("stage/mx_epilogue.cuh", "if (", "col % MK_MX_TILE == 0 && col + MK_MX_TILE / 2 == cols", ["false"]),
    ("stage/backward_sm100.cuh", "half = ", "(task.kind & TASK_KIND_MASK) == MK_TASK_GATE_UP ? 0 : (int32_t)TileBackward::cols / 2", ["0"]),
    ("stage/backward_sm100.cuh", "scale_x = ", "k * 2", ["k"]),
    ("stage/backward_sm100.cuh", "k = ", "outer ? r.a_y : r.a_x", ["r.a_x"]),
    ("stage/backward_sm100.cuh", "a_row = ", "outer ? r.a_x : r.a_y", ["r.a_y"]),
    ("stage/backward_sm100.cuh", "b_row = ", "outer ? r.b_x : r.b_y", ["r.b_y"]),
    ("stage/backward_sm100.cuh", "scale_x, ", "(b_row + half) / MK_SCALE_ATOM_ROWS", ["b_row / MK_SCALE_ATOM_ROWS"]),
    ("stage/backward_sm100.cuh", "how.missing_rows = ", "(uint32_t)task.num_k_blocks * block_depth(how.scaled) - (uint32_t)task.num_rows", ["0"]),
    ("stage/backward_sm100.cuh", "s.gemm.scales[stage][2]), ", "r.b_high + 1", ["r.b_low + 1"]),
    ("stage/backward_sm100.cuh", "how.scaled = ", "is_scaled<Mx>(task)", ["false"]),
    ("stage/wgrad.cuh", "first = ", "warp_idx() % 4 * MK_MX_BLOCK", ["0"]),
    ("stage/wgrad.cuh", "load(scales + ", "mk_mx_scale_index(row, col / MK_MX_BLOCK, cols)", ["mk_mx_scale_index(row, 0, cols)"]),
    ("stage/wgrad.cuh", "mk_mx_scale_index(", "col + i", ["col"]),
    ("stage/wgrad.cuh", "mk_mx_scale_index(col + i, ", "block.first / MK_MX_BLOCK", ["0"]),
    ("stage/wgrad.cuh", "(of_x && ", "!with_x", ["true"]),
    ("gemm/pair.cuh", "block = ", "(rows + 31) / 32", ["MK_SCALE_ATOM_BLOCKS", "rows / 32"]),
    ("gemm/pair.cuh", "first = ", "rows", ["0", "rows + 1"]),
    ("gemm/pair.cuh", "b + step * ", "pair_next_step(how.b_outer, 32)", ["pair_next_step(how.b_outer, 16)", "pair_next_step(false, 32)"]),
    ("gemm/pair.cuh", "mk_mma_descriptor_mx(2 * Tile::rows, Tile::cols, ", "how.a_outer", ["false"]),
    ("stage/mx.cuh", "r[i] = ", "mx_reciprocal(scale)", ["1.0f"]),
    ("gemm/pair.cuh", "s.columns_taken[i]), ", "kWarpsPerTile<Tile>", ["kWarpsPerTile<Tile> - 1", "kWarpsPerTile<Tile> * Tile::cluster"]),
    ("gemm/pair.cuh", "s.columns_taken[warpgroup]), ", "turn.parity", ["turn.parity ^ 1"]),
    ("stage/forward.cuh", "how.scaled = ", "!is_shared(task.kind)", ["false"]),
    ("gemm/pair.cuh", "leading_full = cluster_addr(full, ", "0", ["1"]),
    ("gemm/pair.cuh", "in.a, x, ", "task.row", ["0"]),
    ("gemm/pair.cuh", "in.b_high, x, ", "task.col + in.b_high_row", ["task.col"]),
    ("gemm/pair.cuh", "kStageScaleBytes) : ", "2 * kPairStageBytes", ["kPairStageBytes", "2 * kPairStageBytes - 16"]),
    ("gemm/pair.cuh", "(full, scaled ? ", "2 * (kPairStageBytes + kStageScaleBytes)", ["2 * kPairStageBytes", "2 * kPairStageBytes + kStageScaleBytes"]),
    ("gemm/pair.cuh", "in.a_scales, x, ", "task.row / MK_SCALE_ATOM_ROWS", ["0"]),
    ("gemm/pair.cuh", "in.b_low_scales, x, ", "task.col / MK_SCALE_ATOM_ROWS", ["0"]),
    ("gemm/pair.cuh", "in.b_high_scales, x, ", "(task.col + in.b_high_row) / MK_SCALE_ATOM_ROWS", ["task.col / MK_SCALE_ATOM_ROWS"]),
    ("gemm/pair.cuh", "MK_MMA_E4M3, MK_MMA_E4M3, ", "step", ["0"]),
    ("gemm/pair.cuh", "tcgen05_copy_scales_pair(scales + ", "i * MK_SCALE_ATOM_COLUMNS", ["0"]),
    ("gemm/pair.cuh", "from = All::address + ", "(second ? 0 : kSumsApart<Tile>)", ["0", "kSumsApart<Tile>"]),
    ("gemm/pair.cuh", "acc.second = ", "warpgroup == 1", ["false", "true"]),
    ("gemm/pair.cuh", "Tile::cluster * ", "(Tile::scaled ? 2 : 1)", ["1"]),
    ("gemm/pair.cuh", "s.sums_ready[i]), ", "kWarpsPerTile<Tile> * Tile::cluster", ["kWarpsPerTile<Tile>", "kWarpsPerTile<Tile> * Tile::cluster + 1"]),
    ("gemm/pair.cuh", "tensor_memory + ", "turn.slot * kSumsApart<Tile>", ["0", "turn.slot * Tile::cols"]),
    ("gemm/pair.cuh", "accumulate = ", "k > 0 || how.continues", ["true", "k > 0"]),
    ("gemm/pair.cuh", "s.empty[at.slot]), ", "kBothCtas", ["1"]),
    ("gemm/pair.cuh", "s.sums_full[turn.slot]), ", "kBothCtas", ["1"]),
    ("gemm/pair.cuh", "task.row = task.out_row = ", "kNoRows", ["0"]),
    ("stage/yield.cuh", "flag_load_relaxed_gpu(&tickets[MK_YIELD_COUNTED]) < ", "num_clusters()", ["num_clusters() + 1", "num_clusters() - 1"]),
    ("stage/yield.cuh", "ticket_take_relaxed_gpu(&tickets[MK_YIELD_PRESENT], ~0u) >= ", "2", ["1", "0"]),
    ("stage/yield.cuh", "if (left < ", "num_clusters() - how.num_resident", ["num_clusters()", "num_clusters() - how.num_resident - 1"]),
    ("arch/tensor_map.h", "t.swizzle = ", "MK_SWIZZLE_128B", ["MK_SWIZZLE_NONE"]),
    ("arch/tensor_map.h", "t.box[1] = ", "box_rows", ["box_rows / 2"]),
    ("kernel/forward.cu", "gemm_begin(s.gemm, ", "kForwardStores<Mx> ? 1 + kStoreWarps : 1", ["kForwardStores<Mx> ? kStoreWarps : 0", "kForwardStores<Mx> ? 2 + kStoreWarps : 2"]),
    ("gemm/broad.cuh", "s.empty[at.slot]), ", "at.parity() ^ 1", ["at.parity()"]),
    ("gemm/broad.cuh", "(full, ", "kStageBytes<TileBroad>", ["kStageBytes<TileBroad> - 16", "kStageBytes<TileBroad> + 16"]),
    ("gemm/broad.cuh", "s.finished_full), ", "kMathWarps", ["kMathWarps - 1", "kMathWarps + 1"]),
    ("gemm/broad.cuh", "s.finished_empty), ", "kStoreWarps", ["kStoreWarps - 1", "kStoreWarps + 1"]),
    ("gemm/broad.cuh", "s.low_ready), ", "kMathWarps / 2", ["kMathWarps / 2 - 1", "kMathWarps / 2 + 1"]),
    ("gemm/broad.cuh", "tma_load_3d_multicast(b + ", "rank * half_b * kRowBytes", ["0"]),
    ("gemm/broad.cuh", "first.kind |= ", "same_rows ? kSharesA : 0", ["0"]),
    ("stage/fault.cuh", "r.memory.call_heads) + ", "(call & 1)", ["0"]),
    ("stage/call.cuh", "load(&state->epoch) + ", "1", ["0"]),
    ("stage/call.cuh", "((load(&device_state(r)->calls) + 1) & ", "1", ["0"]),
    ("stage/forward.cuh", "mbar_init(smem_addr(&s.ready[i]), ", "1", ["2"]),
    ("stage/forward.cuh", "w.grid.raises = ", "(int32_t)(kColumnTiles<Tile> * (kForwardStores<Mx> ? kStoreWarps : kWarpsPerTile<Tile>))",
     ["1", "(int32_t)(kColumnTiles<Tile> * (kForwardStores<Mx> ? kStoreWarps : kWarpsPerTile<Tile>)) - 1",
      "(int32_t)(kColumnTiles<Tile> * (kForwardStores<Mx> ? kStoreWarps : kWarpsPerTile<Tile>)) + 1"]),
    ("stage/yield.cuh", "return last = ticket_take_relaxed_gpu(&tickets[", "0", ["1"]),
    ("stage/yield.cuh", "number = ticket_take_relaxed_gpu(&tickets[", "0", ["1"]),
    ("stage/forward.cuh", "smem_addr(&s.ready[at.slot]), ", "at.parity", ["at.parity ^ 1"]),
    ("stage/forward.cuh", "need.counter, need.first, ", "need.count", ["need.count - 1", "1"]),
    ("stage/forward.cuh", "signal(", "MK_COUNTER_s4_tasks_done", ["MK_COUNTER_s2_bwd_tasks_done"]),
    ("kernel/backward.cu", "gemm_begin(s.gemm, ", "1", ["0", "2"]),
    ("stage/backward.cuh", "mbar_init(smem_addr(&s.ready[i]), ", "1", ["2"]),
    ("stage/backward.cuh", "task.row = ", "piece.rows ? (int32_t)ring_row(d, piece.tile_first) : kNoPiece", ["(int32_t)ring_row(d, piece.tile_first)"]),
    ("stage/backward.cuh", "fit = ", "shared || task.row == kNoPiece", ["shared"]),
    ("stage/s1_dispatch.cuh", "walk ? ", "mk_tile_before(walk, r.dims.ring_tiles, tile)", ["-1", "mk_tile_before(walk, r.dims.ring_tiles + 1, tile)"]),
    ("stage/s1_dispatch.cuh", "d.duplicates = ", "(int32_t)population_count(behind & ~(behind + 1))", ["0", "(int32_t)population_count(behind)"]),
    ("stage/s1_dispatch.cuh", "(uint32_t)d.duplicates == ", "Rows - 1", ["Rows"]),
    ("stage/s1_dispatch.cuh", "MK_COUNTER_s1_rows_arrived, tile, (uint32_t)", "mk_valid_rows(&t, tile)", ["1"]),
    ("stage/s1_dispatch.cuh", "(parities >> slot ^ ", "mine / Slots", ["0"]),
    ("stage/s1_dispatch.cuh", "parities ^= ", "(count / Slots % 2 ? (1u << Slots) - 1 : 0) ^ ((1u << count % Slots) - 1)", ["0", "(1u << count % Slots) - 1"]),
    ("stage/s1_dispatch.cuh", "at += Area, parities ^= ", "1", ["0"]),
    ("stage/s1_dispatch.cuh", "const uint32_t rows = d.moves ? 1 + ", "(uint32_t)d.duplicates", ["0"]),
    ("stage/s1_dispatch.cuh", "MK_COUNTER_s1_copies_done, ", "d.from / MK_ROW_TILE", ["tile"]),
    ("stage/stage.cuh", "tickets[", "1 - ticket", ["ticket"]),
    ("stage/weights.cuh", "if (", "low == last", ["last != nullptr"]),
    ("stage/weights.cuh", "tensor_map_set_address(smem_addr(scratch), address + ", "from.offset", ["0"]),
    ("layout/pieces.h", "ends_in = stop > start ? ", "(stop - 1) / mb_tiles", ["stop / mb_tiles"]),
    ("layout/pieces.h", "(stop - 1) / mb_tiles : ", "stop / mb_tiles", ["stop / mb_tiles + 1"]),
    ("layout/pieces.h", "return ", "mk_min(ends_in, last)", ["ends_in"]),
    ("stage/s0_schedule.cuh", "mk_uncut_minibatch(&plan, e - 1) + ", "1", ["2"]),
    ("layout/depend.h", "MK_COUNTER_s1_copies_done, old, old + 1, ", "t->copies_out_fwd[old]", ["0", "t->copies_out_fwd[old] + 1"]),
    ("layout/depend.h", "MK_COUNTER_s2_tasks_done, old, old + 1, ", "mk_raised(g, g->gate_up)", ["0", "mk_raised(g, g->gate_up) + 1"]),
    ("layout/depend.h", "old = w->pass == MK_PASS_FORWARD ? ", "mk_tile_before(w, d->ring_tiles, tile)", ["-1"]),
    ("layout/depend.h", "MK_COUNTER_shared_s2_tasks_done, tile, tile + 1, ", "mk_raised(g, g->shared_gate_up)", ["0"]),
    ("layout/depend.h", "MK_COUNTER_s2_tasks_done, tile, tile + 1, ", "mk_raised(g, g->gate_up)", ["0"]),
    ("layout/depend.h", "case MK_TASK_GATE_UP:\n        if (", "mk_need_rows(t, tile, &index, need)", ["0"]),
]

PRELUDE = """/* tools/mutate.py: is mutant n switched on? Says once that it was reached. */
#include <stdio.h>
#include <stdlib.h>
inline bool mutant(int n)
{
    static const int chosen = getenv("MOK_MUTANT") ? atoi(getenv("MOK_MUTANT")) : -1;
    static bool reached;
    if (n != chosen)
        return false;
    if (!reached)
        fprintf(stderr, "mutant reached\\n");
    return reached = true;
}
"""


def code_only(text):
    """The text with comments and string literals blanked, same length."""
    blank = lambda m: re.sub(r"[^\n]", " ", m.group())
    return re.sub(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\])*\"", blank, text, flags=re.S)


def closing(code, start):
    """Index after the parenthesis that closes the one at `start`."""
    depth = 0
    for i in range(start, len(code)):
        depth += {"(": 1, ")": -1}.get(code[i], 0)
        if depth == 0:
            return i + 1
    raise ValueError("unbalanced parentheses")


def sources():
    """(folder below src, name as in `WRONG`) of every file that may be mutated."""
    for root, below in ("cuda", ""), ("layout", "layout/"):
        top = os.path.join(ROOT, "src", root)
        for folder, dirs, files in os.walk(top):
            dirs.sort()
            for name in sorted(f for f in files if f.endswith((".cuh", ".cu", ".h"))):
                yield root, below + os.path.relpath(os.path.join(folder, name), top)


def in_tree(src, root, path):
    return os.path.join(src, path if root == "layout" else os.path.join(root, path))


def calls_in(text):
    """(start, end) of every call of CALLS that is a statement of its own."""
    code = code_only(text)
    for m in CALLS.finditer(code):
        end = closing(code, m.end() - 1)
        before = code[:m.start()].rstrip()
        if code[end:].lstrip().startswith(";") and before.endswith((";", "{", "}", ")", ":", "else")):
            yield m.start(), end  # else it is a definition, or its value is used


def call_names(text):
    """(start, end, what) of calls_in; what tells the same call in one function apart: the survivors' list names them so."""
    code, seen = code_only(text), {}
    for start, end in calls_in(text):
        heads = FUNCTION.findall(code[:start])
        what = "without " + re.sub(r"\s+", " ", text[start:end]) + (" in " + heads[-1].removesuffix("()") if heads else "")
        seen[what] = seen.get(what, 0) + 1
        yield start, end, what + (f" #{seen[what]}" if seen[what] > 1 else "")


def find_mutants():
    """Mutants as (file, line, what), and what to insert into each file, as {(root, file): [(position, text)]}."""
    mutants, edits = [], {}
    for root, path in sources():
        text = open(in_tree(os.path.join(ROOT, "src"), root, path)).read()
        line = lambda at: text.count("\n", 0, at) + 1
        insert = []
        for start, end, what in [] if path.startswith(NO_CALLS) else call_names(text):
            insert += [(start, f"(mutant({len(mutants)}) ? (void)0 : (void)("), (end, "))")]
            mutants.append((path, line(start), what))
        for before, expression, wrong in (w[1:] for w in WRONG if w[0] == path):
            assert before + expression in text, f"{path} has no {before + expression!r} any more: mend WRONG in tools/mutate.py"
            start = text.index(before + expression) + len(before)
            choice = ""
            for new in wrong:
                choice += f"mutant({len(mutants)}) ? ({new}) : "
                mutants.append((path, line(start), f"{expression}  ->  {new}"))
            insert += [(start, f"({choice}("), (start + len(expression), "))")]
        if insert:
            edits[root, path] = insert
    return mutants, edits


def write_tree(build, edits):
    tree = os.path.join(build, "mutants", "src")
    shutil.rmtree(os.path.join(build, "mutants"), ignore_errors=True)
    for root in "cuda", "layout":
        shutil.copytree(os.path.join(ROOT, "src", root), os.path.join(tree, root))
    for (root, path), insertions in edits.items():
        file = in_tree(tree, root, path)
        text = open(file).read()
        for at, new in sorted(insertions, reverse=True):
            text = text[:at] + new + text[at:]
        open(file, "w").write(text)
    open(os.path.join(tree, "mutant.h"), "w").write(PRELUDE)
    return tree


def compile_tests(build, tree):
    subprocess.run(["cmake", "--build", build, "--target", "mok_emu", "mok_static", "mok_layer"], check=True, stdout=subprocess.DEVNULL)
    libraries = [subprocess.check_output(["find", build, "-name", f"lib{n}.a"], text=True).split()[0] for n in ("mok_emu", "mok_layer", "mok_static")]
    jobs = []
    for name in TESTS:
        out = os.path.join(build, "mutants", "test_" + name)
        jobs.append((name, subprocess.Popen(["g++", "-std=c++17", "-O1", "-ffp-contract=off", "-fno-math-errno", "-w", "-Wno-psabi", "-DMOK_EMU", "-include", os.path.join(tree, "mutant.h"), "-I" + tree, "-I" + os.path.join(ROOT, "src"),
                                             "-I" + os.path.join(ROOT, "include"), "-I" + os.path.join(ROOT, "tests", "support"), "-I" + os.path.join(ROOT, "tests", "emu"), "-I" + os.path.join(ROOT, "cli"),
                                             os.path.join(ROOT, "tests", "emu", f"test_{name}.cpp"), *libraries, "-o", out, "-lpthread", "-lm", "-ldl"])))
    for name, job in jobs:
        if job.wait() != 0:
            sys.exit(f"the mutants of test_{name} do not compile")


def killed_by(build, n, tests, seeds, first_seed, known=(), deadline=float("inf")):
    """The case that notices mutant n, or None (failures in `known` do not count); and whether any test reached it. TimeoutError: not known in time."""
    reached = False
    for seed in range(first_seed, first_seed + seeds):
        for name in tests:
            env = dict(os.environ, MOK_MUTANT=str(n), MOK_TEST_SEED=str(seed), MOK_TEST_SEEDS="1")
            process = subprocess.Popen([os.path.join(build, "mutants", "test_" + name)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
            for line in process.stdout:
                reached |= "mutant reached" in line
                if time.time() > deadline:
                    process.kill()
                    process.wait()
                    raise TimeoutError
                if line.startswith("FAIL") and line.split()[1] not in known:
                    process.kill()
                    process.wait()
                    return f"{name}: {line.split()[1]}", True
            if process.wait() not in (0, 1):
                return f"{name}: died ({process.returncode})", True
    return None, reached


def fails_anyway(build, test, seed):
    """The cases of a test that fail without any mutant."""
    known = set()
    while (found := killed_by(build, -2, [test], 1, seed, known)[0]) is not None:
        case = found.split(": ")[1]
        if case.startswith("died"):
            sys.exit(f"without any mutant, {found}")
        print(f"fails without any mutant, so it cannot judge: {case}", flush=True)
        known.add(case)
    return known


def tests_of(file):
    """The tests that are tried for a mutant of this file, of those that were asked for."""
    tests = RUN_BY[max((start for start in RUN_BY if file.startswith(start)), key=len)].split()
    return [t for t in tests if t in TESTS]


def read_survivors(mutants):
    """Explained survivors: {(file, what): reason}."""
    explained, made = {}, {(file, what) for file, _, what in mutants}
    with open(os.path.join(ROOT, "tools", "mutate_survivors.txt")) as lines:
        for line in lines:
            if line.strip() and not line.startswith("#"):
                file, what, reason = (part.strip() for part in line.split(" :: "))
                assert (file, what) in made, f"{file} has no mutant {what!r} any more: mend tools/mutate_survivors.txt"
                explained[file, what] = reason
    return explained


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--build", required=True)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--first-seed", type=int, default=1)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--only", default="")
    options.add_argument("--sample", type=int, default=0)
    options.add_argument("--minutes", type=float, default=1e9)
    options.add_argument("--jobs", type=int, default=os.cpu_count())
    options.add_argument("--tests", default=",".join(TESTS))
    options.add_argument("--trust", action="store_true", help="the tests are known to pass without a mutant")
    options.add_argument("--list", action="store_true")
    args = options.parse_args()
    TESTS[:] = args.tests.split(",")
    mutants, edits = find_mutants()
    explained = read_survivors(mutants)
    numbers = [n for n, m in enumerate(mutants) if re.search(args.only, f"{m[0]}: {m[2]}") and tests_of(m[0])]
    if args.sample:
        numbers = sorted(random.Random(args.seed).sample(numbers, min(args.sample, len(numbers))))
    if args.list:
        for n in numbers:
            print(f"{n:4} {mutants[n][0]}:{mutants[n][1]}: {mutants[n][2]}")
        return 0
    deadline = time.time() + args.minutes * 60
    needed = {t for n in numbers for t in tests_of(mutants[n][0])}
    TESTS[:] = [t for t in TESTS if t in needed]
    build = os.path.abspath(args.build)
    compile_tests(build, write_tree(build, edits))
    pool = concurrent.futures.ThreadPoolExecutor(args.jobs)
    known = set() if args.trust else set().union(*pool.map(lambda test: fails_anyway(build, test, args.first_seed), TESTS))
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    print(f"{len(numbers)} of {len(mutants)} mutants, {args.seeds} seeds from {args.first_seed} on" + (f"; sample {args.seed}" if args.sample else ""), flush=True)

    def judge(n):
        file, line, what = mutants[n]
        where = f"{file}:{line}: {what}"
        if time.time() > deadline:
            return "skipped", f"SKIP {where}: out of time"
        reason = explained.get((file, what))
        try:
            test, reached = killed_by(build, n, tests_of(file), 1 if reason else args.seeds, args.first_seed, known, deadline)
        except TimeoutError:
            return "skipped", f"SKIP {where}: out of time"
        if test:
            return "passed", f"PASS {where}  [{test}]"
        if reason:
            return "passed", f"PASS {where}  [survives: {reason}]"
        return "failed", f"FAIL {where}  [survives{'' if reached else ', never reached'}]"

    for verdict, text in pool.map(judge, numbers):
        counts[verdict] += 1
        print(text, flush=True)
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return counts["failed"] != 0


if __name__ == "__main__":
    sys.exit(main())
