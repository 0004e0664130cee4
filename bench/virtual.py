#!/usr/bin/env python3
"""Two virtual ranks on one GPU beside one rank with as many rows: the same tokens, routes and experts, which both own together or one owns alone.

    python3 bench/virtual.py --mok build/mok [--json out.json]

A round is one run of `mok bench --only layer` each, in the other order every second round; a run's figure is the median of its passes, by the host's clock. The
ratio, two virtual ranks over one, is taken within a round; its median and quartiles are printed.
"""

import argparse
import json
import os
import statistics
import subprocess

# name -> arguments of mok bench, and the tokens of all ranks
SHAPES = {
    "kimi-k2.7-code": (["--model", "kimi-k2.7-code", "--experts", "8", "--shared", "0"], 2048),
    "qwen3-30b-a3b": (["--model", "qwen3-30b-a3b", "--experts", "128"], 8192),
}
SMALL = (["--experts", "8", "--topk", "2", "--hidden", "128", "--intermediate", "64"], 512)
PASSES = ("forward", "backward")


def run(options, words, tokens, ranks):
    """-> milliseconds by pass, and what they were taken on"""
    where = ["--backend", "cuda", "--devices", "1"] if options.backend == "cuda" else ["--backend", "cpu"]
    words = [options.mok, "bench", "--only", "layer", "--json", *where, *words, "--tokens", str(tokens // ranks), "--ranks", str(ranks), "--repeat", str(options.repeat)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with exit code {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
    record = json.loads(done.stdout)
    return {what: record["layer"][what]["p50_ms"] for what in PASSES}, {"device": record["gpu"]["name"] if record["gpu"] else record["device"], "rows": record["layer"]["rows"]}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--mok", required=True, help="the tool")
    p.add_argument("--backend", default="cuda", choices=("cpu", "cuda"), help="cpu: to try the program, with one small shape")
    p.add_argument("--rounds", type=int, default=8)
    p.add_argument("--repeat", type=int, default=20, help="passes of a run")
    p.add_argument("--json", help="write the records here")
    options = p.parse_args()
    records = []
    print(f"{'shape':<20}  {'pass':>8}  {'EP 1 ms':>9}  {'2 virtual':>9}  {'ratio (quartiles)':>21}")
    for shape, (words, tokens) in SHAPES.items() if options.backend == "cuda" else [("small", SMALL)]:
        times = {ranks: {what: [] for what in PASSES} for ranks in (1, 2)}
        for turn in range(options.rounds):
            for ranks in (2, 1) if turn % 2 else (1, 2):
                ms, about = run(options, words, tokens, ranks)
                for what in PASSES:
                    times[ranks][what].append(ms[what])
        for what in PASSES:
            low, middle, high = statistics.quantiles([b / a for a, b in zip(times[1][what], times[2][what])], n=4)
            records.append({"shape": shape, "pass": what, "tokens": tokens, "rounds": options.rounds, "repeat": options.repeat, "ep1_ms": statistics.median(times[1][what]),
                            "virtual_ms": statistics.median(times[2][what]), "ratio": middle, "ratio_quartiles": [low, middle, high], **about, "commit": os.environ.get("MOK_COMMIT")})
            r = records[-1]
            print(f"{shape:<20}  {what:>8}  {r['ep1_ms']:>9.3f}  {r['virtual_ms']:>9.3f}  {middle:.3f} ({low:.3f}-{high:.3f})", flush=True)
        if options.json:
            with open(options.json, "w") as file:
                file.write(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
