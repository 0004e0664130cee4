#!/usr/bin/env python3
"""Where the time must go on a GB200/GB300 at EP 64: bytes and operations of one tile, and of one rank's forward, against what the chip can do. Arithmetic,
not a measurement. Models come from cli/models.c. Prints the tables of docs/blackwell.md.

  tools/tile_bounds.py [--tokens 8192] [--ranks 64] [MODEL ...]
"""
import argparse
import os
import re

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SEEDS = ["kimi-k2.7-code", "glm-5.2", "deepseek-v4-pro", "qwen3.5-397b-a17b"]

# Data sheet of one B200 (of a GB200 NVL72): dense rates, one direction of NVLink 5.
SMS, CLOCK = 148, 1.85e9
RATE = {"bf16": 2.25e15, "mxfp8": 4.5e15}
HBM, NVLINK = 8.0e12, 0.9e12
SHARED_PORT = 128  # bytes a clock and SM out of shared memory

PAIR_ROWS = PAIR_COLS = 256  # one MMA of a pair of CTAs
BLOCK_K = {"bf16": 64, "mxfp8": 128}  # 128 bytes of either


def models():
    text = open(os.path.join(ROOT, "cli", "models.c")).read()
    found = {}
    for entry in re.findall(r"\{\.name = [^}]*\}", text):
        fields = dict(re.findall(r"\.(\w+) = (\"[^\"]*\"|\d+)", entry))
        found[fields["name"].strip('"')] = {k: int(v) for k, v in fields.items() if v.isdigit()}
    return found


def row(*cells):
    print("| " + " | ".join(str(c) for c in cells) + " |")


def tile_table():
    row("one K block of a 256 x 256 tile", "bf16 (K 64)", "mxfp8 (K 128)")
    row("---", "---", "---")
    clocks, loaded, read = [], [], []
    for kind in ("bf16", "mxfp8"):
        per_clock = RATE[kind] / SMS / CLOCK * 2  # of the pair
        clocks.append(2 * PAIR_ROWS * PAIR_COLS * BLOCK_K[kind] / per_clock)
        scales = 0 if kind == "bf16" else (PAIR_ROWS + 2 * PAIR_COLS) * 4  # each CTA holds all scales of B
        loaded.append((PAIR_ROWS + PAIR_COLS) * 128 + scales)
        read.append(loaded[-1])
    row("operations", *("%.1f M" % (2 * PAIR_ROWS * PAIR_COLS * BLOCK_K[k] / 1e6) for k in BLOCK_K))
    row("clocks of the tensor cores, at the data sheet's rate", *("%.0f" % c for c in clocks))
    row("bytes into shared memory, both CTAs", *("%d" % b for b in loaded))
    row("the same, bytes a clock and SM", *("%.0f" % (b / c / 2) for b, c in zip(loaded, clocks)))
    row("out of shared memory by MMAs, bytes a clock and SM (port: %d)" % SHARED_PORT, *("%.0f" % (b / c / 2) for b, c in zip(read, clocks)))
    without = [(2 * 128 + 2 * 256) * 128 / c / 2 for c in clocks]
    row("out of shared memory if each CTA multiplied 128 x 256 alone", *("%.0f" % w for w in without))
    print()


def model_table(names, tokens, ranks):
    known = models()
    row("one rank's forward, T %d, EP %d" % (tokens, ranks), *names)
    row("---", *("---" for _ in names))
    columns = []
    for name in names:
        m = known[name]
        h, i, experts, k = m["hidden"], m["intermediate"], m["experts"], m["topk"]
        rows = tokens * k
        flops = 6.0 * rows * h * i
        shared = 6.0 * tokens * h * m.get("shared", 0)
        link = rows * h * 2 * (ranks - 1) / ranks
        weights = 3.0 * h * i * 2 * experts / ranks
        ring = rows * (3.0 * h + 3 * i) * 2  # x in and out, h in and out, y out (gate and up are not kept)
        waves = rows / 256 * (-(-2 * i // 256) + -(-h // 256)) / (SMS / 2)
        columns.append({
            "H, I, E, K": "%d, %d, %d, %d" % (h, i, experts, k),
            "experts, rows of each (balanced)": "%.1f, %d" % (experts / ranks, rows * ranks / experts),
            "operations, shared expert included": "%.1f T" % ((flops + shared) / 1e12),
            "tensor cores bf16": "%.0f us" % ((flops + shared) / RATE["bf16"] * 1e6),
            "tensor cores mxfp8 (shared expert bf16)": "%.0f us" % ((flops / RATE["mxfp8"] + shared / RATE["bf16"]) * 1e6),
            "NVLink, dispatch in and combine out, each": "%.2f GB" % (link / 1e9),
            "NVLink time, both directions busy": "%.0f us" % (link / NVLINK * 1e6),
            "HBM at least: weights once, ring buffers": "%.2f + %.2f GB" % (weights / 1e9, ring / 1e9),
            "HBM time": "%.0f us" % ((weights + ring) / HBM * 1e6),
            "tiles of 256 x 256 for each pair of SMs": "%.1f" % waves,
            "half-used pairs, at most (odd tiles at expert ends)": "%.1f %%" % (100 * (experts / ranks) * 128 / rows),
            "longest in bf16": max(("tensor cores", (flops + shared) / RATE["bf16"]), ("NVLink", link / NVLINK), ("HBM", (weights + ring) / HBM), key=lambda x: x[1])[0],
        })
    for key in columns[0]:
        row(key, *(c[key] for c in columns))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=SEEDS)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--ranks", type=int, default=64)
    arguments = parser.parse_args()
    tile_table()
    model_table(arguments.models or SEEDS, arguments.tokens, arguments.ranks)


if __name__ == "__main__":
    main()
