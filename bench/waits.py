#!/usr/bin/env python3
"""What the bound of the kernels' waits costs: a pass with the library as it is, beside the same pass with a library whose waits look at no clock.

    python3 bench/waits.py --bounded build/libmok.so --unbounded build-unbounded/libmok.so [--json out.json]

The second is built with -DMOK_UNBOUNDED_WAITS=ON, which is good for nothing else. Each library runs in a process of its own, with the same data, and the two take
turns: in a round each has a burst of passes, in the other order every second round. Where a process has its memory matters a little, too, so both are started
anew ten times. The ratio, bounded over unbounded, is taken within a round; the median and the quartiles of all rounds are printed. If 1 lies between the
quartiles, the measurement cannot tell the bound's cost from noise.
"""

import argparse
import hashlib
import json
import os
import statistics
from pathlib import Path

from compare_builds import Worker

SHAPES = "kimi-k2.7-code-share,qwen3-30b-a3b"
PASSES = ("forward", "backward")


def parse():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--bounded", type=Path, required=True, help="libmok.so as it is")
    p.add_argument("--unbounded", type=Path, required=True, help="libmok.so of -DMOK_UNBOUNDED_WAITS=ON")
    p.add_argument("--device", default="cuda", choices=("cpu", "cuda"), help="cpu: to try the program; the cpu backend has no such waits")
    p.add_argument("--shapes", default=SHAPES, help="names of bench_layer.py, with commas")
    p.add_argument("--scale", type=int, default=1, help="divide tokens and widths, to try the program on a small machine")
    p.add_argument("--starts", type=int, default=10, help="how often both processes are started")
    p.add_argument("--rounds", type=int, default=4, help="of every pass, each time")
    p.add_argument("--calls", type=int, default=10, help="passes of a burst, of which the mean counts")
    p.add_argument("--json", type=Path, help="write the records here")
    return p.parse_args()


# --- measuring ------------------------------------------------------------------------------------------------------------
def measure(workers, what, options, first, times):
    """Adds both libraries' milliseconds of some rounds to `times`."""
    for worker in workers.values():
        worker.ask(**{"pass": what, "calls": options.calls})  # warm
    for turn in range(options.rounds):
        for name in list(workers)[:: -1 if (first + turn) % 2 else 1]:
            times[name].append(workers[name].ask(**{"pass": what, "calls": options.calls})["ms"])


def record_of(shape, what, about, times, options):
    low, middle, high = statistics.quantiles([a / b for a, b in zip(times["bounded"], times["unbounded"])], n=4)
    return {"shape": shape, "pass": what, **about, "starts": options.starts, "rounds": len(times["bounded"]), "calls": options.calls,
            "bounded_ms": statistics.median(times["bounded"]), "unbounded_ms": statistics.median(times["unbounded"]), "ratio": middle,
            "ratio_quartiles": [low, middle, high], "told_from_noise": not low <= 1 <= high, "commit": os.environ.get("MOK_COMMIT")}


def main():
    options = parse()
    libraries, shapes = {"bounded": options.bounded, "unbounded": options.unbounded}, options.shapes.split(",")
    if options.device == "cuda" and len({hashlib.sha256(path.read_bytes()).hexdigest() for path in libraries.values()}) == 1:
        raise SystemExit(f"{options.bounded} and {options.unbounded} are the same library: there is nothing to compare")
    times, about = {(shape, what): {name: [] for name in libraries} for shape in shapes for what in PASSES}, {}
    for start in range(options.starts):
        workers = {name: Worker(f"{name}={path}@--save auto", options) for name, path in libraries.items()}
        for shape in shapes:
            about[shape] = [worker.ask(shape=shape, tokens=0) for worker in workers.values()][0]
            for what in PASSES:
                measure(workers, what, options, start, times[shape, what])
        for worker in workers.values():
            worker.close()
    records = [record_of(shape, what, about[shape], times[shape, what], options) for shape, what in times]
    print(f"{'shape':<26}  {'pass':>8}  {'bounded ms':>10}  {'unbounded ms':>12}  {'ratio (quartiles)':>22}")
    for r in records:
        low, middle, high = r["ratio_quartiles"]
        print(f"{r['shape']:<26}  {r['pass']:>8}  {r['bounded_ms']:>10.3f}  {r['unbounded_ms']:>12.3f}  {middle:.4f} ({low:.4f}-{high:.4f})  "
              f"{'not 1' if r['told_from_noise'] else 'no different from 1'}")
    if options.json:
        options.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
