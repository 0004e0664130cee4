"""The example and the benchmark run, on a small machine too."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mok

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--steps", "4", "--hidden", "64", "--intermediate", "64", "--batch", "2", "--context", "32", "--layers", "1", "--device", "cpu"]


def run(*words, ranks=1, timeout=280, **variables):
    launcher = [sys.executable] if ranks == 1 else [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "MOK_LIBRARY": str(mok._library.library().path), "PYTHONPATH": str(Path(mok.__file__).parents[1]), "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run([*launcher, *map(str, words)], capture_output=True, text=True, timeout=timeout, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_train_moe_follows_the_plain_path_and_repeats_to_the_bit(tmp_path):
    pytest.importorskip("matplotlib")
    results, text = [], tmp_path / "text"
    text.write_bytes((ROOT / "README.md").read_bytes())  # by default it learns the sources, which somebody may be writing
    for attempt in range(2):
        run("examples/train_moe.py", "--layer", "both", *SMALL, "--text", text, "--json", tmp_path / "r.json", "--plot", tmp_path / "p.png")
        results.append(json.loads((tmp_path / "r.json").read_text()))
    assert results[0]["mok"]["digest"] == results[1]["mok"]["digest"] and results[0]["mok"]["losses"] == results[1]["mok"]["losses"]
    assert max(abs(a - b) for a, b in zip(results[0]["mok"]["losses"], results[0]["plain"]["losses"])) < 0.05
    assert (tmp_path / "p.png").stat().st_size > 10000


def test_train_moe_on_experts_times_data_ranks(tmp_path):
    out = run("examples/train_moe.py", "--layer", "both", "--ep", 2, *SMALL, "--json", tmp_path / "r.json", "--plot", "", ranks=4)
    r = json.loads((tmp_path / "r.json").read_text())
    assert "experts over 2" in out and max(abs(a - b) for a, b in zip(r["mok"]["losses"], r["plain"]["losses"])) < 0.05


@pytest.mark.parametrize("ranks", [1, 2])
def test_bench_layer_writes_its_records(ranks, tmp_path):
    run("bench/bench_layer.py", "--device", "cpu", "--scale", 32, "--shapes", "kimi-k2.7-code-share,mixtral", "--pairs", 2, "--modes", "burst", "--passes",
        "forward,backward,train", "--warmup", 1, "--against-ep1", "--json", tmp_path / "b.json", ranks=ranks)
    records = json.loads((tmp_path / "b.json").read_text())
    pairs = {(r["shape"], r["pass"]) for r in records}
    assert len(records) == 6 and pairs == {(s, p) for s in ("kimi-k2.7-code-share", "mixtral-8x7b") for p in ("forward", "backward", "train")}
    for r in records:
        assert {"shape", "T", "H", "I", "E", "K", "ranks", "dtype", "pass", "ms", "tflops", "dense_tflops", "dense_ratio", "baseline_ms", "speedup", "device", "driver", "sm_clock",
                "commit"} <= set(r) and r["ranks"] == ranks and r["ms"]["p50"] > 0
        assert ("ratio_to_ep1" in r) == (ranks > 1) and "ratio_to_ep1_same_table" not in r


def bench_layer(tmp_path, ranks, *words):
    run("bench/bench_layer.py", "--device", "cpu", "--scale", 32, "--pairs", 2, "--modes", "burst", "--warmup", 1, "--json", tmp_path / "b.json", *words, ranks=ranks,
        TORCH_COMPILE_DISABLE="1")  # compiling takes most of the time
    return json.loads((tmp_path / "b.json").read_text())


def test_bench_layer_sends_every_row_to_one_rank_and_compares_with_that_rank_alone(tmp_path):
    records = bench_layer(tmp_path, 2, "--shapes", "kimi-k2.7-code-share", "--routing", "one-rank", "--against-ep1", "--passes", "forward,train", "--tokens", "17,40")
    assert [(r["T"], r["pass"]) for r in records] == [(17, "forward"), (17, "train"), (40, "forward"), (40, "train")]
    for r in records:
        assert r["busiest_rows"] == 2 * 8 * r["T"] and r["routing"] == "one-rank" and r["ratio_to_ep1_same_table"] > 0 and r["ep1_ms"] > 0 and "ratio_to_ep1" not in r


def test_bench_layer_draws_zipf_and_computes_in_mxfp8(tmp_path):
    (r,) = bench_layer(tmp_path, 2, "--shapes", "kimi-k2.7-code-share", "--routing", "zipf", "--dtype", "mxfp8", "--against-ep1", "--without-weight-cache")
    assert r["dtype"] == "mxfp8" and r["ratio_to_bf16"] > 0 and r["ratio_to_ep1_same_table"] > 0 and r["ratio_to_without_weight_cache"] > 0
    assert r["T"] * r["K"] < r["busiest_rows"] < 2 * r["T"] * r["K"]  # skewed, but not onto one rank
    assert 0.001 < r["error"] < 0.08  # what MXFP8 loses against bf16: something, and no more


def test_bench_layer_compares_with_a_workspace_for_more_tokens(tmp_path):
    records = bench_layer(tmp_path, 1, "--shapes", "kimi-k2.7-code-share", "--passes", "forward,train", "--tokens", "20", "--capacity", 32 * 700)
    for r in records:
        assert r["capacity"] == 700 and r["capacity_ring_rows"] > r["ring_rows"] and r["capacity_ratio"] > 0 and r["capacity_total_ratio"] > 0


def test_waits_of_two_libraries_are_compared_round_by_round(tmp_path):
    library = mok._library.library().path
    out = run("bench/waits.py", "--bounded", library, "--unbounded", library, "--device", "cpu", "--scale", 32, "--shapes", "kimi-k2.7-code-share", "--starts", 2, "--rounds", 2,
              "--calls", 1, "--json", tmp_path / "w.json")
    records = json.loads((tmp_path / "w.json").read_text())
    assert [r["pass"] for r in records] == ["forward", "backward"] and all(r["rounds"] == 4 and 0.1 < r["ratio"] < 10 for r in records) and "quartiles" in out


def test_builds_are_compared_round_by_round_with_their_own_settings(tmp_path):
    library = mok._library.library().path
    builds = [f"as_it_is={library}", f"small={library}@--ring-rows 512 --minibatch-rows 128"]
    out = run("bench/compare_builds.py", *builds, "--device", "cpu", "--scale", 32, "--shapes", "kimi-k2.7-code-share:200", "--passes", "total,forward,backward", "--rounds", 3, "--calls", 1,
              "--json", tmp_path / "b.json")
    records = json.loads((tmp_path / "b.json").read_text())
    assert [(r["pass"], r["build"], r["spec"]) for r in records] == [(p, b.partition("=")[0], b) for p in ("forward", "backward", "total") for b in builds]
    assert all(r["T"] == 200 and r["over"] == "as_it_is" and r["rounds"] == 3 and r["ms"] > 0 for r in records) and all(r["ratio"] == 1 for r in records[::2]) and ":200" in out
    assert all(r["ring_rows"] == 512 for r in records[1::2]) and all(r["ring_rows"] > 512 for r in records[::2])


@pytest.mark.parametrize("words", [["=x.so"], ["a"], ["a=x.so", "a=y.so"], ["a=x.so@NAME"], ["a=x.so", "--passes", "forwards"]])
def test_builds_that_cannot_be_compared_are_refused(words):
    done = subprocess.run([sys.executable, "bench/compare_builds.py", *words], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and "error:" in done.stderr
