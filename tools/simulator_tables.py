#!/usr/bin/env python3
"""The tables of docs/simulator.md, from `mok simulate --json`.

    python3 tools/simulator_tables.py --mok build/mok [models|imbalance|signals|b300|racks ...]

Takes some minutes; prints Markdown."""

import argparse
import json
import subprocess

MODELS = ("kimi-k2.7-code", "glm-5.2", "qwen3.5-397b-a17b", "deepseek-v4-pro")
B300 = ("--profile", "b300-x8", "--hidden", "4096", "--intermediate", "1024", "--experts", "512", "--topk", "10", "--ranks", "8", "--tokens", "20480", "--dtype", "mxfp8")


def simulate(mok, *options):
    """-> {(ranks, pass, strategy): run}"""
    done = subprocess.run([mok, "simulate", "--json", *map(str, options)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return {(r["ranks"], r["pass"], r["strategy"]): r for r in json.loads(done.stdout)["runs"]}


def row(*cells):
    print("| " + " | ".join(str(c) for c in cells) + " |", flush=True)


def head(*cells):
    row(*cells)
    row(*("---" if i == 0 else "--:" for i in range(len(cells))))


def models(mok):
    head("model", "type", "pass", "ms", "TFLOP/s", "exposed link", "NCCL / ours", "DeepEP-like / ours", "NCCL, host free", "DeepEP-like, host free")
    for model in MODELS:
        for dtype in ("mxfp8", "bf16"):
            common = ("--profile", "gb300-nvl72", "--model", model, "--ranks", 64, "--tokens", 2048, "--dtype", dtype)
            runs = simulate(mok, *common, "--strategy", "mok,nccl,deepep")
            free = simulate(mok, *common, "--strategy", "nccl,deepep", "--set", "cpu_sync_us=0")
            for what in ("forward", "backward"):
                ours = runs[64, what, "mok"]
                schedule = ours["schedule"] if what == "forward" else 0
                seconds = ours["seconds"] + schedule
                ratios = [r[64, what, s]["seconds"] / seconds for r in (runs, free) for s in ("nccl", "deepep")]
                row(model, dtype, what, f"{ours['seconds'] * 1e3:.3f}" + (f" + {schedule * 1e3:.3f} schedule" if schedule else ""),
                    f"{ours['flops'] / 64 / ours['seconds'] * 1e-12:.0f}", f"{100 * ours['exposed_link'] / ours['seconds']:.0f} %", *(f"{r:.2f}" for r in ratios))


def imbalance(mok):
    head("routing", "rows max/mean", "pull dispatch ms", "push dispatch ms", "pull: link in use", "push: link in use", "pull / push", "pull combine ms", "both reversed ms")
    for routing in ("balanced", "uniform", "zipf:0.2", "zipf:0.4", "hot:0.1", "hot:0.25"):
        runs = simulate(mok, "--profile", "gb300-nvl72", "--model", MODELS[2], "--ranks", 64, "--pass", "forward", "--dtype", "mxfp8", "--routing", routing, "--no-copies", "--ring", 8192,
                        "--minibatch", 2048, "--strategy", "mok,push_dispatch,pull_combine,reversed")
        pull, push, combine, both = (runs[64, "forward", s] for s in ("mok", "push_dispatch", "pull_combine", "reversed"))
        row(routing, f"{pull['rows_max'] / pull['rows_mean']:.2f}", f"{pull['seconds'] * 1e3:.3f}", f"{push['seconds'] * 1e3:.3f}", f"{100 * pull['link_use']:.0f} %",
            f"{100 * push['link_use']:.0f} %", f"{pull['link_use'] / push['link_use']:.2f}", f"{combine['seconds'] * 1e3:.3f}", f"{both['seconds'] * 1e3:.3f}")


def signals(mok):
    head("communication SMs", "signals of a mover, us", "pass ms", "pass without signals ms", "pull ms")
    for sms in (0, 16, 40):
        common = ("--profile", "gb300-nvl72", "--model", MODELS[0], "--ranks", 64, "--pass", "forward", "--comm-sms", sms, "--no-copies")
        push = simulate(mok, *common, "--strategy", "push_dispatch")[64, "forward", "push_dispatch"]
        silent = simulate(mok, *common, "--strategy", "push_dispatch", "--no-signals")[64, "forward", "push_dispatch"]
        pull = simulate(mok, *common, "--strategy", "mok")[64, "forward", "mok"]
        row(sms or "a warp in every SM", f"{push['signal_seconds'] * 1e6:.0f}", f"{push['seconds'] * 1e3:.3f}", f"{silent['seconds'] * 1e3:.3f}", f"{pull['seconds'] * 1e3:.3f}")


def b300(mok):
    """The backward column of the published table, and what each of its costs is."""
    head("ring rows", "measured ms", "replay + macrobatches", "no replay", "no macrobatches", "neither")
    for ring, measured in ((4096, "46.97 / 16.50"), (8192, "32.52 / 12.28"), (16384, "24.66 / 10.39"), (28672, "20.52 / 9.98")):
        common = (*B300, "--pass", "backward", "--ring", ring, "--minibatch-bwd", 2048, "--comm-sms", 52)
        cells = []
        for strategy, save in (("macrobatch", "none"), ("macrobatch", "all"), ("mok", "none"), ("mok", "all")):
            run = simulate(mok, *common, "--strategy", strategy, "--save", save, "--no-copies")[8, "backward", strategy]
            cells.append(f"{run['seconds'] * 1e3:.2f}")
        row(ring, measured, *cells)


def racks(mok):
    head("ranks", "racks", "pass", "slowest rack ms", "mean ms", "simulated in s")
    for ranks, count in ((72, 1), (72, 4)):
        for (_, what, _), run in simulate(mok, "--profile", "gb300-nvl72", "--model", MODELS[0], "--ranks", ranks, "--racks", count, "--strategy", "mok").items():
            row(ranks, count, what, f"{run['seconds'] * 1e3:.3f}", f"{run['seconds_mean_of_racks'] * 1e3:.3f}", f"{run['took']:.1f}")


def main():
    tables = {f.__name__: f for f in (models, imbalance, signals, b300, racks)}
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--mok", default="build/mok")
    p.add_argument("tables", nargs="*", default=list(tables), help=", ".join(tables))
    options = p.parse_args()
    for name in options.tables:
        print(f"\n## {name}")
        tables[name](options.mok)


if __name__ == "__main__":
    main()
