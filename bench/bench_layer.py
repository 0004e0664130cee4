#!/usr/bin/env python3
"""One MoE layer: MoK, the plain PyTorch path and dense matrix products of the same sizes, measured in alternation in one run.

    python3 bench/bench_layer.py --device cuda                                 one GPU
    torchrun --standalone --nproc-per-node=2 bench/bench_layer.py              one process per GPU
    python3 bench/bench_layer.py --shapes kimi,mixtral --json out.json --png out.png

    torchrun … bench/bench_layer.py --routing one-rank --against-ep1 --tokens 512,2048,8192

Every sample is one round: schedule + forward of MoK, its forward alone, the plain path, the dense products. Ratios are taken within a round;
the table shows their median and quartiles. `burst` leaves the chip time to cool between the parts of a round, `sustained` keeps it busy.
With several ranks a time is that of the slowest one.

Shapes called NAME-share are what one GPU of an EP-64 group owns: El experts per rank, ids drawn uniformly with replacement. The others are
whole layers, their experts spread over the ranks at hand. --routing zipf draws experts with weights 1, 1/2, 1/3 … in a shuffled order; one-rank
sends every row to rank 0. With either, floating-point work is that of the busiest rank.

--against-ep1 measures in the same rounds what each rank would take alone. Uniform routing: T tokens over its own experts, as many rows as
before. Skewed routing: all ranks' tokens, and of their routes those to this rank: its row table, row for row.

--capacity measures in the same rounds the same tokens in a workspace for more of them: time is to follow the rows that there are.
Without installing: PYTHONPATH=python MOK_LIBRARY=build/libmok.so.
"""

import argparse
import ctypes
import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import baseline  # noqa: E402

import mok  # noqa: E402
from mok import _mx  # noqa: E402

# Hidden, intermediate, experts, top-k, intermediate of the shared expert, of public models' MoE layers.
MODELS = {
    "kimi-k2.7-code": (7168, 2048, 384, 8, 2048),
    "glm-5.2": (6144, 2048, 256, 8, 2048),
    "qwen3.5-397b-a17b": (4096, 1024, 512, 10, 1024),
    "deepseek-v4-pro": (7168, 3072, 384, 6, 3072),
    "deepseek-v3": (7168, 2048, 256, 8, 2048),
    "deepseek-v4-flash": (4096, 2048, 256, 6, 2048),
    "qwen3-30b-a3b": (2048, 768, 128, 8, 0),
    "mixtral-8x7b": (4096, 14336, 8, 2, 0),
    "olmoe-1b-7b": (2048, 1024, 64, 8, 0),
    "gpt-oss-20b": (2880, 2880, 32, 4, 0),
}
# name -> (model, tokens per rank, experts per rank or None for the whole layer)
CASES = {
    "kimi-k2.7-code-share": ("kimi-k2.7-code", 2048, 6),
    "glm-5.2-share": ("glm-5.2", 2048, 4),
    "qwen3.5-397b-a17b-share": ("qwen3.5-397b-a17b", 2048, 8),
    "deepseek-v4-pro-share": ("deepseek-v4-pro", 2048, 6),
    "deepseek-v3-share": ("deepseek-v3", 2048, 4),
    "deepseek-v4-flash-share": ("deepseek-v4-flash", 2048, 4),
    "kimi-k2.7-code-share-8k": ("kimi-k2.7-code", 8192, 6),
    "qwen3-30b-a3b": ("qwen3-30b-a3b", 8192, None),
    "mixtral-8x7b": ("mixtral-8x7b", 4096, None),
    "olmoe-1b-7b": ("olmoe-1b-7b", 8192, None),
    "gpt-oss-20b": ("gpt-oss-20b", 8192, None),
    # Whole layers of the largest models: tens of GiB of weights; only when asked for by --shapes or --all.
    "deepseek-v4-flash": ("deepseek-v4-flash", 8192, None),
    "deepseek-v3": ("deepseek-v3", 8192, None),
    "glm-5.2": ("glm-5.2", 8192, None),
    "qwen3.5-397b-a17b": ("qwen3.5-397b-a17b", 8192, None),
    "kimi-k2.7-code": ("kimi-k2.7-code", 8192, None),
    "deepseek-v4-pro": ("deepseek-v4-pro", 8192, None),
}
USUAL = list(CASES)[:11]
PASSES = ("forward", "backward", "train")  # train: forward and backward
PASS_FORWARDS = {"forward": 1, "backward": 2, "train": 3}  # in units of the forward's flops


# --- the machine --------------------------------------------------------------------------------------------------------
class Machine:
    """What the numbers were taken on. SM clocks are sampled while a measurement runs."""

    def __init__(self, device):
        self.device, self.driver, self.clocks, self._handle = device, None, [], None
        self.name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
        if device.type == "cuda":
            self._open_nvml()

    def _open_nvml(self):
        try:
            self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        if self._nvml.nvmlInit_v2():
            return
        text, handle = ctypes.create_string_buffer(96), ctypes.c_void_p()
        if not self._nvml.nvmlSystemGetDriverVersion(text, 96):
            self.driver = text.value.decode()
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        uuid = uuid if uuid.startswith("GPU-") else "GPU-" + uuid
        if not self._nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
            self._handle = handle

    def _sample(self):
        value = ctypes.c_uint()
        while not self._stop.wait(0.02):
            if not self._nvml.nvmlDeviceGetClockInfo(self._handle, 1, ctypes.byref(value)):
                self.clocks.append(value.value)

    def __enter__(self):
        self.clocks, self._stop, self._thread = [], threading.Event(), None
        if self._handle:
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error):
        self._stop.set()
        if self._thread:
            self._thread.join()

    @property
    def sm_clock(self):
        return statistics.median(self.clocks) if self.clocks else None


def _cpu_name():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "cpu"


def git_commit():
    def git(*words):
        return subprocess.run(["git", "-C", str(Path(__file__).resolve().parent), *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("MOK_COMMIT")


# --- the contestants ----------------------------------------------------------------------------------------------------
class Engine:
    """A workspace of MoK with its inputs: what is called for a pass."""

    def __init__(self, shape, group, ids, inputs, weights):
        self.ids, self.weights = ids, weights
        self.x, self.dout, self.router_weights = inputs
        self.out = torch.empty_like(self.x)
        self.workspace = mok.Workspace(shape, group)
        self.run_schedule()
        self.workspace.wait()

    def run_schedule(self):
        self.schedule = self.workspace.schedule(self.ids)[0]

    def run_forward(self):
        self.workspace.forward(self.schedule, self.x, self.router_weights, self.weights, context=False, out=self.out)

    def run_total(self):
        self.run_schedule()
        self.run_forward()

    def prepare_backward(self, grads):
        self.grads = grads
        _, self.context = self.workspace.forward(self.schedule, self.x, self.router_weights, self.weights, context=True)
        self.run_backward()
        self.workspace.wait()

    def run_backward(self):
        return self.workspace.backward(self.schedule, self.context, self.dout, self.x, self.router_weights, self.weights, self.grads)

    def run_train(self):
        _, self.context = self.workspace.forward(self.schedule, self.x, self.router_weights, self.weights, context=True, out=self.out)
        self.run_backward()

    def run_train_total(self):
        self.run_schedule()
        self.run_train()

    def run(self, what):
        return {"forward": self.run_forward, "backward": self.run_backward, "train": self.run_train}[what]

    def table(self):
        return self.workspace.schedule_info(self.schedule)


def draw_routes(options, experts, ranks, tokens, topk):
    """[ranks, tokens, topk]: one generator draws all ranks' ids, so that every number of ranks sees the same routing of the same tokens."""
    generator, size = torch.Generator("cpu").manual_seed(options.seed), (ranks, tokens, topk)
    if options.routing == "zipf":
        weights = 1 / torch.arange(1, experts + 1)
        order = torch.randperm(experts, generator=generator)
        return order[torch.multinomial(weights, ranks * tokens * topk, True, generator=generator)].view(size).to(torch.int32)
    chosen = mok.expert_range(experts, ranks, 0)[1] if options.routing == "one-rank" else experts
    return torch.randint(chosen, size, generator=generator, dtype=torch.int32)


class Layer:
    """Tensors of one case, and a function for each thing that is measured. MoK and the plain path share the weights [El, 2I, H] and [El, H, I]."""

    def __init__(self, name, tokens, options, group, process_group):
        model, usual_tokens, local = CASES[name]
        self.hidden, self.width, experts, self.topk, shared = MODELS[model]
        self.name, self.group, self.process_group, self.device, self.options = name, group, process_group, group.device, options
        if options.scale > 1:
            self.hidden, self.width = (max(64, n // options.scale // 64 * 64) for n in (self.hidden, self.width))
        self.tokens = tokens or max(1, usual_tokens // options.scale)
        self.experts = local * group.size if local else experts
        # A library expert count below top-k is refused: a small share gets experts that nobody chooses.
        self.declared = max(self.experts, self.topk) if group.size == 1 else self.experts
        self.first, self.local = mok.expert_range(self.declared, group.size, group.rank)
        self.shared = self._shared_width(shared)
        self.engines = {}  # those that MoK is compared with
        self._make_tensors()
        self.mok = self._engine(group, self.declared, self.ids, (self.x, self.dout, self.router_weights), self.weights, options.dtype, self.shared)
        self._count_rows()
        if options.dtype != "bf16":
            self.engines["bf16"] = self._engine(group, self.declared, self.ids, (self.x, self.dout, self.router_weights), self._bf16_weights(), "bf16", self.shared)
        if options.without_weight_cache:
            self.engines["anew"] = self._engine(group, self.declared, self.ids, (self.x, self.dout, self.router_weights), self.weights, options.dtype, self.shared, keep=False)
        if options.against_ep1 and group.size > 1:
            self.engines["ep1"] = self._alone()
        if options.capacity:
            self.engines["roomy"] = self._engine(group, self.declared, self.ids, (self.x, self.dout, self.router_weights), self.weights, options.dtype, self.shared,
                                                 most=max(self.tokens, options.capacity // options.scale))

    def _shared_width(self, shared):
        if not self.options.shared:
            return 0
        return max(64, shared // self.options.scale // 64 * 64) if shared else 0

    def _engine(self, group, experts, ids, inputs, weights, dtype, shared, keep=True, most=0):
        o = self.options
        shape = mok.Shape(self.hidden, self.width, experts, self.topk, most or ids.shape[0], shared_intermediate=shared, gate_up="combined", dtype=dtype, save=o.save, mx_keep_wide=keep,
                          ring_rows=o.ring_rows, minibatch_rows=o.minibatch_rows, minibatch_rows_bwd=o.minibatch_rows_bwd or o.minibatch_rows)
        return Engine(shape, group, ids, inputs, weights)

    def _randn(self, *shape, scale=1.0):
        return torch.randn(*shape, dtype=torch.bfloat16, device=self.device, generator=self.generator).mul_(scale)

    def _inputs(self, tokens):
        """x, dout, router weights"""
        x, dout = self._randn(tokens, self.hidden), self._randn(tokens, self.hidden)
        return x, dout, torch.softmax(torch.rand(tokens, self.topk, device=self.device, generator=self.generator), -1)

    def _make_tensors(self):
        self.generator = torch.Generator(self.device).manual_seed(self.options.seed + 1000 * self.group.rank)
        self.all_ids = draw_routes(self.options, self.experts, self.group.size, self.tokens, self.topk)
        self.ids = self.all_ids[self.group.rank].to(self.device)
        self.x, self.dout, self.router_weights = self._inputs(self.tokens)
        self.gate_up = self._randn(self.local, 2 * self.width, self.hidden, scale=self.hidden**-0.5)
        self.down = self._randn(self.local, self.hidden, self.width, scale=self.width**-0.5)
        if self.shared:
            self.shared_gate = self._randn(2 * self.shared, self.hidden, scale=self.hidden**-0.5)
            self.shared_down = self._randn(self.hidden, self.shared, scale=self.shared**-0.5)
        chosen = self.experts if self.group.size == 1 else self.local
        self.plain_gate_up, self.plain_down = self.gate_up[:chosen], self.down[:chosen]
        self.weights = self._bf16_weights() if self.options.dtype == "bf16" else self._with_shared(*(_mx.quantise(w, True, True) for w in (self.gate_up, self.down)))

    def _with_shared(self, gate_up, down):
        shared = dict(shared_gate=self.shared_gate, shared_down=self.shared_down) if self.shared else {}
        return mok.LayerWeights(gate=gate_up, down=down, **shared)

    def _bf16_weights(self):
        return self._with_shared(self.gate_up, self.down)

    def _alone(self):
        """This rank by itself: the same number of rows, or with a skewed routing the same row table."""
        experts = max(self.local, self.topk)
        if self.options.routing == "uniform":
            generator = torch.Generator("cpu").manual_seed(self.options.seed + 7 + self.group.rank)
            ids = torch.randint(self.local, (self.tokens, self.topk), generator=generator, dtype=torch.int32)
        else:
            ids = self.all_ids.reshape(-1, self.topk) - self.first
            ids[(ids < 0) | (ids >= self.local)] = -1
        unused = [torch.zeros(experts - self.local, *w.shape[1:], dtype=w.dtype, device=self.device) for w in (self.gate_up, self.down)]
        gate_up, down = (torch.cat(pair) if len(pair[1]) else pair[0] for pair in zip((self.gate_up, self.down), unused))
        weights = mok.LayerWeights(gate=gate_up, down=down)
        if self.options.dtype != "bf16":
            weights = mok.LayerWeights(gate=_mx.quantise(gate_up, True, True), down=_mx.quantise(down, True, True))
        engine = self._engine(mok.Group.local(self.device), experts, ids.to(self.device), self._inputs(len(ids)), weights, self.options.dtype, 0)
        engine.gradients = mok.LayerGrads(gate=torch.empty_like(gate_up), down=torch.empty_like(down))
        return engine

    def _count_rows(self):
        """Rows of the busiest rank: what the pass cannot be faster than."""
        rows = torch.tensor([self.mok.table().rows], device=self.device)
        if self.group.size > 1:
            torch.distributed.all_reduce(rows, torch.distributed.ReduceOp.MAX, group=self.process_group)
        self.busiest_rows = int(rows)
        self.rows = self.tokens * self.topk if self.options.routing == "uniform" else self.busiest_rows

    def flops(self, what):
        return 6.0 * self.hidden * (self.rows * self.width + self.tokens * self.shared) * PASS_FORWARDS[what]

    def dense_flops(self, what):
        return 6.0 * self.rows * self.hidden * self.width * PASS_FORWARDS[what]

    def padding_share(self):
        info = self.mok.table()
        return 1 - info.rows / info.table_rows if info.table_rows else 0.0

    def close(self):
        for engine in (self.mok, *self.engines.values()):
            engine.workspace.close()

    def plain(self, layer=None):
        if layer is not None:
            y = layer(self.x, self.ids.long(), self.router_weights, self.plain_gate_up, self.plain_down, self.group.size)
        else:
            y = baseline.moe_layer(self.x, self.ids, self.router_weights, self.plain_gate_up, self.plain_down, self.process_group, self.group.size)
        if self.shared:
            y = y + baseline.swiglu(self.x @ self.shared_gate.t()) @ self.shared_down.t()
        return y

    def prepare_backward(self):
        grads = mok.LayerGrads(gate=torch.empty_like(self.gate_up), down=torch.empty_like(self.down),
                               shared_gate=torch.empty_like(self.shared_gate) if self.shared else None,
                               shared_down=torch.empty_like(self.shared_down) if self.shared else None)
        for engine in (self.mok, *self.engines.values()):
            engine.prepare_backward(getattr(engine, "gradients", grads))
        self.plain_gate_up, self.plain_down = self.plain_gate_up.detach(), self.plain_down.detach()
        self.leaves = [t.requires_grad_() for t in (self.x, self.router_weights, self.plain_gate_up, self.plain_down)]
        self.graph = {}

    def plain_backward(self, layer=None):
        if layer not in self.graph:
            self.graph[layer] = self.plain(layer)
        return torch.autograd.grad(self.graph[layer], self.leaves, self.dout, retain_graph=True)

    def plain_train(self, layer=None):
        torch.autograd.grad(self.plain(layer), self.leaves, self.dout)

    def make_dense(self, what):
        """The layer's products as dense ones of the same number of rows: [rows, H] x [H, 2I] and [rows, I] x [I, H], or their four gradients."""
        rows = self.rows if self.options.routing == "uniform" else max(int(self.mok.table().rows), 1)

        def random(*shape):
            return torch.randn(*shape, dtype=torch.bfloat16, device=self.device)

        x, h = random(rows, self.hidden), random(rows, self.width)
        up, down = random(2 * self.width, self.hidden), random(self.hidden, self.width)
        wide, narrow = torch.empty(rows, 2 * self.width, dtype=x.dtype, device=x.device), torch.empty_like(x)
        products = [(x, up.t(), wide), (h, down.t(), narrow)]
        if what != "forward":
            d_wide, d_narrow = random(rows, 2 * self.width), random(rows, self.hidden)
            products = (products if what == "train" else []) + [(d_narrow, down, h.clone()), (d_wide, up, narrow), (d_narrow.t(), h, torch.empty_like(down)), (d_wide.t(), x, torch.empty_like(up))]

        def run():
            for a, b, out in products:
                torch.mm(a, b, out=out)

        return run


COPY_DISTANCE = 2048  # MK_COPY_DISTANCE of src/layout/table.h: the simulator must know which rows a record's layer copied

# How far MoK and the plain path, which is bf16, may differ, as a share of the result's size.
LIMITS = {"bf16": (0.02, 0.03), "mxfp8": (0.08, 0.15)}


def difference(a, b):
    size = b.float().abs().sum().item()
    return (a.float() - b.float()).abs().sum().item() / size if size else float((a != 0).any())


def check_same(layer, options):
    """The contestants compute the same thing, within the arithmetic's error."""
    layer.mok.run_total()
    layer.mok.workspace.wait()
    error = difference(layer.mok.out, layer.plain())
    if not error < LIMITS[options.dtype][0]:
        raise SystemExit(f"{layer.name}: MoK and the plain path differ by {error:.3g} of the output's size; nothing was measured")
    return error


def check_same_gradients(layer):
    """dx, the router weights' gradient and those of both weights against autograd through the plain path -> the worst error."""
    dx, drouter = layer.mok.run_backward()
    layer.mok.workspace.wait()
    want = layer.plain_backward()
    chosen = layer.plain_gate_up.shape[0]
    got = (dx, drouter, layer.mok.grads.gate[:chosen], layer.mok.grads.down[:chosen])
    worst = 0.0
    for name, a, b in zip(("dx", "drouter_weights", "dgate_up", "ddown"), got, want):
        error = difference(a, b)
        if not error < LIMITS[layer.options.dtype][1]:
            raise SystemExit(f"{layer.name}: {name} of MoK and of the plain path differ by {error:.3g} of its size; nothing was measured")
        worst = max(worst, error)
    return worst


# --- measuring ----------------------------------------------------------------------------------------------------------
def wait_for_all(layer):
    if layer.device.type == "cuda":
        torch.cuda.synchronize(layer.device)
    if layer.group.size > 1:
        torch.distributed.barrier(layer.process_group)


QUEUE_CYCLES = 600_000  # some 300 us in which the CPU can get ahead, so that the GPU's time is measured; the CPU's has its own column


def time_once(layer, function, calls):
    """Milliseconds of one call, averaged over `calls` in a row; and microseconds that the CPU spent on each."""
    wait_for_all(layer)
    if layer.device.type == "cpu":
        start = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - start) * 1e3 / calls, None
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(QUEUE_CYCLES)
    begin.record()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    host = time.perf_counter() - start
    end.record()
    torch.cuda.synchronize(layer.device)
    return begin.elapsed_time(end) / calls, host * 1e6 / calls


def quartiles(values):
    ordered = sorted(values)
    return [ordered[min(len(ordered) - 1, int(q * len(ordered)))] for q in (0.25, 0.5, 0.75)]


def percentile(values, q):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def contestants(layer, what, other):
    """name -> what is called, in the order of a round."""
    ours, roomy, plain = layer.mok, layer.engines.get("roomy"), {"forward": layer.plain, "backward": layer.plain_backward, "train": layer.plain_train}[what]
    total, roomy_total = ({"forward": engine.run_total, "train": engine.run_train_total}.get(what) if engine else None for engine in (ours, roomy))
    named = {"mok": ours.run(what), "total": total, "plain": plain, "dense": layer.make_dense(what), "schedule": ours.run_schedule if what == "forward" else None,
             "other": (lambda: plain(other)) if other else None, **{name: engine.run(what) for name, engine in layer.engines.items()}, "roomy_total": roomy_total}
    return {name: function for name, function in named.items() if function}


def measure(layer, what, mode, options, machine, other):
    """-> milliseconds of every round, by contestant."""
    named = contestants(layer, what, other)
    times, host = {name: [] for name in named}, {name: [] for name in named}
    grad = torch.enable_grad() if what != "forward" else torch.no_grad()
    with grad, machine:
        calls = {}
        for name, function in named.items():
            for _ in range(options.warmup):
                function()
            once, _ = time_once(layer, function, 2)
            calls[name] = 1 if mode == "burst" else max(1, min(200, int(options.busy_ms / max(once, 1e-3))))
        if layer.group.size > 1:  # the same on all ranks
            shared = torch.tensor(list(calls.values()), device=layer.device)
            torch.distributed.broadcast(shared, torch.distributed.get_global_rank(layer.process_group, 0), group=layer.process_group)
            calls = dict(zip(calls, shared.tolist()))
        for _ in range(options.pairs):
            for name, function in named.items():
                if mode == "burst":
                    time.sleep(options.rest_ms / 1e3)
                ms, us = time_once(layer, function, calls[name])
                times[name].append(ms)
                if us is not None:
                    host[name].append(us)
    layer.mok.workspace.wait()
    return slowest(layer, times), host


def slowest(layer, times):
    """Of the ranks, round by round."""
    if layer.group.size == 1:
        return times
    all_times = torch.tensor(list(times.values()), dtype=torch.float64, device=layer.device)
    torch.distributed.all_reduce(all_times, torch.distributed.ReduceOp.MAX, group=layer.process_group)
    return dict(zip(times, all_times.tolist()))


def record_of(layer, what, mode, times, host, error, machine, commit, options):
    fast = times["plain"] if "other" not in times or statistics.median(times["plain"]) <= statistics.median(times["other"]) else times["other"]
    ours = times.get("total", times["mok"])
    speedup = quartiles([b / m for b, m in zip(fast, ours)])
    dense = quartiles([d / m for d, m in zip(times["dense"], times["mok"])])
    flops = layer.flops(what)
    ms = statistics.median(times["mok"])
    record = {
        "shape": layer.name, "T": layer.tokens, "H": layer.hidden, "I": layer.width, "E": layer.experts, "K": layer.topk, "ranks": layer.group.size,
        "shared": layer.shared, "save": options.save, "ring_rows": layer.mok.workspace.plan.ring_rows,
        "minibatch_rows": layer.mok.workspace.plan.forward.minibatch_rows, "minibatch_rows_bwd": layer.mok.workspace.plan.backward.minibatch_rows,
        "copy_distance": COPY_DISTANCE, "dtype": options.dtype,
        "weight_cache_bytes": _mx.kept_bytes() if layer.mok.workspace.keeps_wide else 0,
        "routing": {"uniform": "replacement"}.get(options.routing, options.routing),  # as the simulator calls it
        "busiest_rows": layer.busiest_rows, "pass": what, "mode": mode,
        "ms": {"p50": ms, "p99": percentile(times["mok"], 0.99)},
        "tflops": flops / ms * 1e-9, "dense_tflops": layer.dense_flops(what) / statistics.median(times["dense"]) * 1e-9,
        "dense_ratio": dense[1], "dense_ratio_quartiles": dense,
        "baseline_ms": statistics.median(fast), "speedup": speedup[1], "speedup_quartiles": speedup, "pairs": options.pairs,
        "plain_ms": statistics.median(times["plain"]), "other_ms": statistics.median(times["other"]) if "other" in times else None,
        "total_ms": statistics.median(ours), "schedule_ms": statistics.median(times["schedule"]) if "schedule" in times else None,
        "host_us": statistics.median(host["mok"]) if host["mok"] else None,
        "padding_share": layer.padding_share(), "error": error, "swiglu": baseline.swiglu_kind,
        "device": machine.name, "driver": machine.driver, "sm_clock": machine.sm_clock, "commit": commit,
        "torch": torch.__version__, "env": {k: v for k, v in os.environ.items() if k.startswith("MOK_") and k != "MOK_LIBRARY"},
    }
    for name, key in (("ep1", "ratio_to_ep1" if options.routing == "uniform" else "ratio_to_ep1_same_table"), ("bf16", "ratio_to_bf16"),
                      ("anew", "ratio_to_without_weight_cache")):
        if name in times:
            ratio = quartiles([m / t for m, t in zip(times["mok"], times[name])])
            record.update({f"{name}_ms": statistics.median(times[name]), f"{name}_ring_rows": layer.engines[name].workspace.plan.ring_rows, key: ratio[1],
                           f"{key}_quartiles": ratio})
    for name, fitting, key in (("roomy", "mok", "capacity_ratio"), ("roomy_total", "total", "capacity_total_ratio")):
        if name in times:
            workspace, ratio = layer.engines["roomy"].workspace, quartiles([t / m for m, t in zip(times[fitting], times[name])])
            record.update({"capacity": workspace.shape.max_tokens, "capacity_ring_rows": workspace.plan.ring_rows, f"{name}_ms": statistics.median(times[name]),
                           key: ratio[1], f"{key}_quartiles": ratio})
    return record


# --- output -------------------------------------------------------------------------------------------------------------
COLUMNS = (("shape", 26), ("T", 6), ("H", 6), ("I", 6), ("E", 4), ("K", 3), ("pass", 9), ("mode", 10), ("ms p50", 9), ("p99", 9), ("TFLOP/s", 8), ("dense", 7),
           ("of dense (quartiles)", 21), ("sched", 7), ("total", 8), ("plain", 8), ("speedup (quartiles)", 20), ("MHz", 5), ("pad", 5), ("host us", 8),
           ("of EP 1", 8), ("of bf16", 8), ("of uncached", 11),
           ("in roomy", 8))


def print_head():
    print("  ".join(f"{name:<{width}}" if i == 0 else f"{name:>{width}}" for i, (name, width) in enumerate(COLUMNS)), flush=True)


def print_row(r):
    def three(values):
        return f"{values[1]:.3f} ({values[0]:.3f}-{values[2]:.3f})"

    def number(value, digits):
        return "-" if value is None else f"{value:.{digits}f}"

    cells = (r["shape"], r["T"], r["H"], r["I"], r["E"], r["K"], r["pass"], r["mode"], number(r["ms"]["p50"], 3), number(r["ms"]["p99"], 3),
             number(r["tflops"], 1), number(r["dense_tflops"], 1), three(r["dense_ratio_quartiles"]), number(r["schedule_ms"], 3), number(r["total_ms"], 3),
             number(r["baseline_ms"], 3), three(r["speedup_quartiles"]), number(r["sm_clock"], 0), f"{100 * r['padding_share']:.0f}%", number(r["host_us"], 0),
             number(r.get("ratio_to_ep1", r.get("ratio_to_ep1_same_table")), 3), number(r.get("ratio_to_bf16"), 3),
             number(r.get("ratio_to_without_weight_cache"), 3), number(r.get("capacity_ratio"), 3))
    print("  ".join(f"{cell!s:<{width}}" if i == 0 else f"{cell!s:>{width}}" for i, (cell, (_, width)) in enumerate(zip(cells, COLUMNS))), flush=True)


def draw(records, path):
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print(f"{path} was not drawn: matplotlib is not installed")
        return
    labels = [f"{r['shape']}\n{r['pass']}, {r['mode']}" for r in records]
    place = range(len(records))
    figure, axis = plt.subplots(figsize=(max(8, 1.3 * len(records)), 5))
    for shift, key, label, colour in ((-0.27, "tflops", "MoK", "#2a6f97"), (0, "dense_tflops", "dense products", "#a9a9a9"), (0.27, None, "plain PyTorch", "#e07a5f")):
        heights = [r[key] if key else r["tflops"] * r["ms"]["p50"] / r["baseline_ms"] for r in records]
        axis.bar([p + shift for p in place], heights, 0.26, label=label, color=colour)
    axis.set_xticks(list(place), labels, rotation=60, ha="right", fontsize=8)
    axis.set_ylabel("TFLOP/s")
    axis.set_title(f"{records[0]['device']}, {records[0]['ranks']} rank(s), {records[0]['dtype']}, routing: {records[0]['routing']}")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)


# --- main ---------------------------------------------------------------------------------------------------------------
def parse(arguments=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", default=None, choices=("cpu", "cuda"), help="default: cuda if there is one")
    p.add_argument("--shapes", default="", help="comma-separated names, or parts of names; default: the usual ones")
    p.add_argument("--all", action="store_true", help="also whole layers of the largest models")
    p.add_argument("--passes", default="forward", help="forward, backward, train: comma-separated")
    p.add_argument("--routing", default="uniform", choices=("uniform", "zipf", "one-rank"))
    p.add_argument("--dtype", default="bf16", choices=tuple(LIMITS), help="of MoK's routed experts; mxfp8 is measured beside bf16")
    p.add_argument("--without-weight-cache", action="store_true",
                   help="mxfp8 on Hopper: also with weights that every pass widens anew, in the same rounds; otherwise they are widened once and kept")
    p.add_argument("--against-ep1", action="store_true", help="with ranks: also every rank by itself, with the same rows")
    p.add_argument("--capacity", type=int, default=0, help="also in a workspace for so many tokens per rank: `in roomy` is its time over that of the one that fits")
    p.add_argument("--modes", default="burst,sustained")
    p.add_argument("--pairs", type=int, default=24, help="rounds, each with every contestant")
    p.add_argument("--warmup", type=int, default=3)
    p.add_argument("--busy-ms", type=float, default=40, help="sustained: how long each contestant runs at a time")
    p.add_argument("--rest-ms", type=float, default=5, help="burst: rest before each")
    p.add_argument("--tokens", default="0", help="tokens per rank instead of the shape's; several with commas")
    p.add_argument("--scale", type=int, default=1, help="divide tokens and widths, to try the program on a small machine")
    p.add_argument("--shared", action="store_true", help="with the model's shared expert (left out of ratios otherwise)")
    p.add_argument("--save", default="auto", help="save policy of MoK's context")
    p.add_argument("--ring-rows", type=int, default=0, help="rows of the ring; default: as the library chooses")
    p.add_argument("--minibatch-rows", type=int, default=0, help="rows of a minibatch; default: as the library chooses")
    p.add_argument("--minibatch-rows-bwd", type=int, default=0, help="of the backward, if not the same")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--other-baseline", help="a Python file with layer(x, ids, weights, gate_up, down, ranks); the faster of the two counts")
    p.add_argument("--json", help="write the records here")
    p.add_argument("--png", help="draw them here")
    options = p.parse_args(arguments)
    wanted = [part for part in options.shapes.split(",") if part]
    options.names = [n for n in CASES if any(part == n or part in n and part not in CASES for part in wanted)] if wanted else list(CASES) if options.all else USUAL
    if options.without_weight_cache and options.dtype != "mxfp8":
        p.error("--without-weight-cache goes with --dtype mxfp8")
    options.passes, options.modes = options.passes.split(","), options.modes.split(",")
    try:
        options.tokens = [int(n) for n in options.tokens.split(",")]
    except ValueError:
        p.error(f"--tokens is {options.tokens!r}, but must be numbers with commas")
    if not options.names or set(options.passes) - set(PASSES) or set(options.modes) - {"burst", "sustained"}:
        p.error(f"shapes: {', '.join(CASES)}; passes: {', '.join(PASSES)}; modes: burst, sustained")
    return options


def open_ranks(options):
    """-> this rank's group and process group."""
    kind = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    world, local_rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    if world == 1:
        return mok.Group.local(device), None
    torch.distributed.init_process_group("nccl" if kind == "cuda" else "gloo", **({"device_id": device} if kind == "cuda" else {}))
    return mok.Group.of(None, device), torch.distributed.group.WORLD


def load_other(path):
    if not path:
        return None
    spec = importlib.util.spec_from_file_location("other_baseline", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.layer


def run_case(name, tokens, options, group, process_group, machine, commit, other):
    try:
        layer = Layer(name, tokens, options, group, process_group)
    except mok.UnsupportedError as refusal:
        if group.rank == 0:
            print(f"{name}: left out: {refusal}", flush=True)
        return []
    with torch.no_grad():
        error = check_same(layer, options)
    records = []
    for what in options.passes:
        try:
            if what != "forward":
                layer.prepare_backward()
                with torch.enable_grad():
                    error = check_same_gradients(layer)
        except mok.UnsupportedError as refusal:
            print(f"{name}: no backward: {refusal}")
            continue
        for mode in options.modes:
            times, host = measure(layer, what, mode, options, machine, other)
            records.append(record_of(layer, what, mode, times, host, error, machine, commit, options))
            if group.rank == 0:
                print_row(records[-1])
    layer.close()
    return records


def main(arguments=None):
    options = parse(arguments)
    group, process_group = open_ranks(options)
    machine, commit, other = Machine(group.device), git_commit(), load_other(options.other_baseline)
    kind, records = baseline.compile_swiglu(group.device), []
    if group.rank == 0:
        print(f"{machine.name}, driver {machine.driver}, {group.size} rank(s), torch {torch.__version__}, libmok {mok.version()}, commit {commit}, {options.dtype}, {options.routing} routing, "
              f"plain path's SwiGLU: {kind}; speedup = plain / (schedule + forward), of dense = dense / forward")
        print_head()
    for name, tokens in ((name, tokens) for name in options.names for tokens in options.tokens):
        try:
            records += run_case(name, tokens, options, group, process_group, machine, commit, other)
        except torch.OutOfMemoryError as error:
            print(f"{name}: left out, not enough memory: {error}")
        except mok.RunError as error:
            print(f"{name}: failed: {error}")
            if group.size > 1:
                raise
        gc.collect()
        if group.device.type == "cuda":
            torch.cuda.empty_cache()
        if options.json and group.rank == 0:
            Path(options.json).write_text(json.dumps(records, indent=1) + "\n")
    if options.png and group.rank == 0 and records:
        draw(records, options.png)
    if group.size > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
