#!/usr/bin/env python3
"""Several builds of the library, or one with several settings, on one GPU in turn: what a change is worth.

    python3 bench/compare_builds.py before=old/libmok.so after=build/libmok.so [--shapes kimi-k2.7-code-share:1024,mixtral-8x7b]
                                    [--passes forward,train] [--json out.json]
    python3 bench/compare_builds.py plain=build/libmok.so "ring=build/libmok.so@--ring-rows 4352" "env=build/libmok.so@NAME=VALUE"

Each runs in a process of its own, with the same data. In a round each has a burst of passes, in the other order every second round; ratios to the first one are
taken within a round, and their median and quartiles printed. Cards of one kind differ by more than most changes are worth: only what ran together compares.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

PASSES = ("forward", "backward", "train", "schedule", "total")  # in this order: a new schedule makes the context of a backward stale
SHAPES = "kimi-k2.7-code-share,glm-5.2-share,deepseek-v4-pro-share,qwen3.5-397b-a17b-share,qwen3-30b-a3b,mixtral-8x7b"


def parse():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("builds", nargs="+", help="NAME=LIBMOK.SO, behind it @OPTIONS of bench_layer.py or @VARIABLE=VALUE, any number of them")
    p.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    p.add_argument("--shapes", default=SHAPES, help="names of bench_layer.py, or NAME:TOKENS, with commas")
    p.add_argument("--passes", default="forward,train", help="schedule, forward, total (both), backward, train (forward and backward)")
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--calls", type=int, default=8, help="passes of a burst, of which the mean counts")
    p.add_argument("--scale", type=int, default=1, help="divide tokens and widths, to try the program on a small machine")
    p.add_argument("--json", type=Path, help="write the records here")
    p.add_argument("--serve", nargs="*", help=argparse.SUPPRESS)
    options = p.parse_args()
    names = [build.partition("=")[0] for build in options.builds]
    for name, build in zip(names, options.builds):
        library, *settings = build.partition("=")[2].split("@")
        if not name or not library or any("=" not in s for s in settings if not s.startswith("-")):
            p.error(f"{build!r} is not NAME=LIBMOK.SO, with @--option value or @VARIABLE=VALUE behind it")
    if len(set(names)) < len(names):
        p.error(f"two builds have one name: {', '.join(names)}")
    if set(options.passes.split(",")) - set(PASSES):
        p.error(f"--passes is {options.passes!r}: there are {', '.join(PASSES)}")
    options.passes = [name for name in PASSES if name in options.passes.split(",")]
    return options


# --- the process of one build: a line asks for a shape or for a burst, a line answers ------------------------------------
class Worker:
    """spec: as on the command line. options: device and scale. bench/waits.py uses it too."""

    def __init__(self, spec, options):
        self.name, _, rest = spec.partition("=")
        library, *more = rest.split("@")
        settings = [m for m in more if m.startswith("-")]
        variables = dict(m.split("=", 1) for m in more if not m.startswith("-"))
        words = [sys.executable, __file__, spec, "--device", options.device, "--scale", str(options.scale)]
        words += ["--serve", *(" " + word for s in settings for word in s.split())]  # a blank in front: options of another program
        environment = {**os.environ, "MOK_LIBRARY": str(Path(library).resolve()), **variables}
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def ask(self, **what):
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"the process of {self.name} ended with exit code {self.process.wait()}")
        return json.loads(answer)

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def serve(options):
    import torch

    import bench_layer
    import mok

    words = ["--device", options.device, "--scale", str(options.scale), "--save", "all", *(w.strip() for w in options.serve)]
    layer_options = bench_layer.parse(words)
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    layer = None
    for line in sys.stdin:
        what = json.loads(line)
        if "shape" in what:
            if layer:
                layer.close()
            layer = bench_layer.Layer(what["shape"], what["tokens"], layer_options, mok.Group.local(device), None)
            layer.mok.prepare_backward(mok.LayerGrads(gate=torch.empty_like(layer.gate_up), down=torch.empty_like(layer.down)))
            answer = {"T": layer.tokens, "E": layer.experts, "rows": layer.busiest_rows, "ring_rows": layer.mok.workspace.plan.ring_rows, "device": bench_layer.Machine(device).name}
        else:
            answer = {"ms": bench_layer.time_once(layer, getattr(layer.mok, "run_" + what["pass"]), what["calls"])[0]}
            layer.mok.workspace.wait()  # a pass that failed has no time
        print(json.dumps(answer), flush=True)
    if layer:
        layer.close()


# --- measuring ------------------------------------------------------------------------------------------------------------
def measure(workers, what, options):
    """-> name: milliseconds of each round."""
    times = {w.name: [] for w in workers}
    for turn in range(-1, options.rounds):
        for worker in workers[:: -1 if turn % 2 else 1]:
            ms = worker.ask(**{"pass": what, "calls": options.calls})["ms"]
            if turn >= 0:  # the first is to warm
                times[worker.name].append(ms)
    return times


def records_of(shape, what, times, about, options):
    """about: name -> what its worker said of the shape."""
    first = next(iter(times))
    records = []
    for spec, (name, ms) in zip(options.builds, times.items()):
        ratios = sorted(a / b for a, b in zip(ms, times[first]))
        records.append({"shape": shape, "pass": what, "build": name, "over": first, "ms": round(statistics.median(ms), 4), "ratio": round(statistics.median(ratios), 4),
                        "quartiles": [round(ratios[len(ratios) // 4], 4), round(ratios[len(ratios) * 3 // 4], 4)], "rounds": len(ms), "calls": options.calls, "spec": spec,
                        "commit": os.environ.get("MOK_COMMIT", ""), **about[name]})
    return records


def main():
    options = parse()
    if options.serve is not None:
        return serve(options)
    import bench_layer

    shapes = []
    for shape in options.shapes.split(","):
        name, _, tokens = shape.partition(":")
        if name not in bench_layer.CASES or not (tokens or "0").isdigit():
            raise SystemExit(f"no shape {shape}: there are {', '.join(bench_layer.CASES)}, behind each :TOKENS or nothing")
        shapes.append((name, int(tokens or 0)))
    workers = [Worker(spec, options) for spec in options.builds]
    records = []
    print(f"{'shape':28} {'pass':9}" + "".join(f" {w.name:>26}" for w in workers))
    for shape, tokens in shapes:
        about = {w.name: w.ask(shape=shape, tokens=tokens) for w in workers}
        for what in options.passes:
            rows = records_of(shape, what, measure(workers, what, options), about, options)
            records += rows
            cells = (f"{r['ms']:8.3f} {r['ratio']:.3f} {r['quartiles'][0]:.3f}-{r['quartiles'][1]:.3f}" for r in rows)
            print(f"{shape + (f':{tokens}' if tokens else ''):28} {what:9}" + "".join(f" {c:>26}" for c in cells), flush=True)
    for worker in workers:
        worker.close()
    if options.json:
        options.json.write_text("[\n" + ",\n".join("  " + json.dumps(r) for r in records) + "\n]\n")


if __name__ == "__main__":
    main()
