"""Ranks as processes with a GPU each: the same bits as one GPU, a thousand times; graphs; ranks that die.

    MOK_TEST_DEVICE=cuda pytest tests/torch/test_devices.py        as many processes as GPUs; fewer than two: skipped
    MOK_TEST_PROCESSES=2 pytest tests/torch/test_devices.py        on the CPU, with fewer repeats, and calls in place of graphs

What needs no rank to die runs in one set of processes, part by part. Each part is told when it ends (-s shows it): one that fails or hangs takes
only itself and those behind it.
"""

import functools
import io
import os
import queue
import signal
import time

import jobs
import pytest
import ranks
import reference
import torch
import torch.multiprocessing as multiprocessing

import mok

ON_GPU = os.environ.get("MOK_TEST_DEVICE", "cpu") == "cuda"
COUNT = int(os.environ.get("MOK_TEST_PROCESSES", torch.cuda.device_count() if ON_GPU else 0))
REPEATS, REPLAYS = (1000, 2000) if ON_GPU else (20, 20)
TIMEOUT, FAULT_TIMEOUT = 30.0, 5.0  # seconds that a rank waits for another
START, PART = 120.0, 60.0  # seconds until the processes have begun, and for each part

if COUNT < 2:
    pytest.skip("needs a GPU for each of two processes (MOK_TEST_DEVICE=cuda), or MOK_TEST_PROCESSES", allow_module_level=True)

# What must not change a bit: name -> (the problem, the engine's options, those of the call, environment while the workspace is made). Engines of one shape
# share a workspace, so no two have the same.
LARGE = dict(tokens=300, hidden=512, width=384, experts=12, topk=3, shared=128, output_gate=True)
WAYS = {
    "fused": (LARGE, dict(save="all"), {}, {}),
    "staged": (LARGE, dict(save="ring"), {}, {"MOK_FORWARD": "staged", "MOK_BACKWARD": "staged"}),
    "small_ring": (dict(tokens=700, hidden=256, width=192, experts=10, topk=4), dict(ring_rows=512, minibatch_rows=256, minibatch_rows_bwd=256, save="none"), {}, {}),
    "recompute": (dict(tokens=200, hidden=256, width=192, experts=9, topk=2, dropped=0.2), {}, dict(recompute=True), {}),
    "mxfp8": (dict(tokens=200, hidden=256, width=192, experts=8, topk=3), dict(dtype="mxfp8"), {}, {}),
}


def device_of(rank):
    if not ON_GPU:
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


class Failed(str):
    """What a rank says that could not do its part."""


class environment:
    def __init__(self, variables):
        self.variables = variables

    def __enter__(self):
        os.environ.update(self.variables)

    def __exit__(self, *error):
        for name in self.variables:
            os.environ.pop(name)


# --- in the processes -----------------------------------------------------------------------------------------------------
def solve(group, shape, options, call):
    p = reference.make(**shape)
    engine = mok.engine(group=group, hidden=shape["hidden"], intermediate=shape["width"], num_experts=shape["experts"], topk=shape["topk"], max_tokens=shape["tokens"],
                        shared_intermediate=shape.get("shared", 0), shared_gate=shape.get("output_gate", False), **options)
    return jobs.solve(group, p, engine=engine, **call)


def one_way(group, name):
    """-> this rank's results, and on rank 0 those of the whole problem on its GPU alone; or a refusal's sentence."""
    shape, options, call, variables = WAYS[name]
    with environment(variables):
        try:
            return solve(group, shape, options, call), solve(mok.Group.local(group.device), shape, options, call) if group.rank == 0 else None
        except mok.UnsupportedError as refusal:
            return str(refusal), None


def as_bytes(tensors):
    """All of them one after the other, where they are."""
    return torch.cat([t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors])


def progress(group, name, done, count, engine):
    """Four times: so far it has really come."""
    if done % (count // 4) == 0:
        engine.wait()
        if group.rank == 0:
            print(f"  {name}: {done} of {count}", flush=True)


def repeat(group):
    """-> how many of a thousand steps have other results than the first. Compared where they are, and read at the end."""
    p = jobs.cut(reference.make(tokens=128, hidden=256, width=128, experts=8, topk=3), group)
    engine = mok.engine(group=group, hidden=256, intermediate=128, num_experts=8, topk=3, max_tokens=128)
    x, w, *weights = leaves = [t.detach().requires_grad_() for t in (p.x, p.router_weights, p.gate, p.up, p.down)]
    different, first = torch.zeros((), dtype=torch.int64, device=group.device), None
    for step in range(REPEATS):
        out = mok.moe(x, p.expert_ids, w, *weights, engine=engine)
        results = as_bytes([out, *torch.autograd.grad(out, leaves, p.dout)])
        first = results if first is None else first
        different += (results != first).any()
        progress(group, "repeats", step + 1, REPEATS, engine)
    return different.item()


def replay(group):
    """A captured schedule and forward, replayed with other tokens and routes each time -> wrong replays, forwards and schedules counted, a call afterwards is right."""
    p, device = reference.make(tokens=64), group.device
    first, count = mok.expert_range(8, group.size, group.rank)
    every = [w.to(device) for w in (p.gate, p.up, p.down)]
    mine = [w[first : first + count].contiguous() for w in every]
    engine = mok.engine(group=group, hidden=128, intermediate=64, num_experts=8, topk=2, max_tokens=64)
    ids, x, w = p.expert_ids.int().to(device), p.x.to(device), p.router_weights.to(device)
    random, wrong = torch.Generator(device).manual_seed(1 + group.rank), torch.zeros((), dtype=torch.int64, device=device)
    engine.prepare()
    with torch.no_grad():
        out = mok.moe(x, ids, w, *mine, engine=engine)
        if ON_GPU:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = mok.moe(x, ids, w, *mine, engine=engine)
        for step in range(REPLAYS):
            ids.copy_(torch.rand(64, 8, generator=random, device=device).argsort(-1)[:, :2])
            x.normal_(generator=random)
            if ON_GPU:
                graph.replay()
            else:
                out = mok.moe(x, ids, w, *mine, engine=engine)
            wrong += (out != mok.moe(x, ids, w, *every)).any()
            progress(group, "replays", step + 1, REPLAYS, engine)
        again = torch.equal(mok.moe(x, ids, w, *mine, engine=engine), out)
    engine.wait()
    stats = engine.workspace(64).stats()
    return wrong.item(), stats.forwards, stats.schedules, again


def tell(rank, results, name, value):
    """As bytes, because tensors would be fetched from this process later."""
    file = io.BytesIO()
    torch.save(value, file)
    results.put((rank, name, file.getvalue()))


def leave(rank, results):
    results.close()
    results.join_thread()
    if rank == 0:
        time.sleep(2.0)  # it holds the store that names the absent
    os._exit(0)


# MXFP8 is last: least is known of it.
PARTS = {name: functools.partial(one_way, name=name) for name in WAYS if name != "mxfp8"} | {"repeat": repeat, "replay": replay, "mxfp8": functools.partial(one_way, name="mxfp8")}


def work(rank, count, port, results):
    """Everything that needs no rank to die, in one set of processes: they take long to start."""
    ranks.join_world(rank, count, port)
    group = mok.Group.of(torch.distributed.group.WORLD, device_of(rank), timeout=TIMEOUT)
    tell(rank, results, "begin", None)
    for name, part in PARTS.items():
        try:
            tell(rank, results, name, part(group))
        except BaseException as error:
            tell(rank, results, name, Failed(f"rank {rank} in {name}: {type(error).__name__}: {error}"))
            break  # the ranks are no longer in step
    leave(rank, results)


def die(rank, count, port, how, results):
    """Rank 1 kills or stops itself in its twentieth step. The others tell what they saw, when, and what memory they got back."""
    ranks.join_world(rank, count, port)
    told = {"sentence": "fine"}
    tokens, hidden = (2048, 1024) if ON_GPU else (64, 128)
    p = reference.make(tokens=tokens, hidden=hidden, width=128, experts=16, topk=4)
    group = mok.Group.of(torch.distributed.group.WORLD, device_of(rank), timeout=FAULT_TIMEOUT)
    engine = mok.engine(group=group, hidden=hidden, intermediate=128, num_experts=16, topk=4, max_tokens=tokens)
    start = time.monotonic()
    try:
        for step in range(100000):
            if rank == 1 and step == 20:
                os.kill(os.getpid(), how)
            start = time.monotonic()
            jobs.solve(group, p, engine=engine)
            engine.wait()
    except Exception as error:
        told["sentence"], told["seconds"] = f"{type(error).__name__}: {error}", time.monotonic() - start
    if ON_GPU:
        plan, before = engine.workspace(tokens).plan, torch.cuda.mem_get_info()[0]
        try:
            engine.close()
        except Exception as error:
            told["sentence"] += f"; closing: {type(error).__name__}: {error}"
        torch.cuda.empty_cache()
        told["freed"], told["held"] = torch.cuda.mem_get_info()[0] - before, plan.heap_bytes + plan.local_bytes
    tell(rank, results, "told", told)
    leave(rank, results)


# --- here -----------------------------------------------------------------------------------------------------------------
def start(function, *arguments):
    context, port = multiprocessing.get_context("spawn"), ranks.free_port()
    results = context.Queue()
    processes = [context.Process(target=function, args=(r, COUNT, port, *arguments, results), daemon=True) for r in range(COUNT)]
    for process in processes:
        process.start()
    return processes, Told(results)


class Told:
    """What ranks tell, by part: one may be parts ahead of another."""

    def __init__(self, results):
        self.results, self.parts = results, {}

    def of(self, name, count, timeout):
        """By rank, what so many have found in a part. Fewer, if they do not tell in time."""
        found, end = self.parts.setdefault(name, {}), time.monotonic() + timeout
        try:
            while len(found) < count:
                rank, part, data = self.results.get(timeout=max(end - time.monotonic(), 0.01))
                self.parts.setdefault(part, {})[rank] = torch.load(io.BytesIO(data), weights_only=False)
        except queue.Empty:
            pass
        return found


@pytest.fixture(scope="module")
def found():
    """found(part) -> what each rank has found in it, in rank order."""
    processes, told = start(work)
    assert len(told.of("begin", COUNT, START)) == COUNT, f"not all of {COUNT} processes began within {START:g} s"
    for name in PARTS:
        begin, part = time.monotonic(), told.of(name, COUNT, PART)
        failed = [value for value in part.values() if isinstance(value, Failed)]
        silent = [r for r in range(COUNT) if r not in part]
        print(f"{name}: {time.monotonic() - begin:.2f} s", *failed, *(f"rank {r} has not ended after {PART:g} s" for r in silent), sep="\n  ", flush=True)
        if failed or silent:
            break
    for process in processes:
        process.join(0 if failed or silent else 30)
        process.kill()
    last = name

    def take(name):
        part = told.parts.get(name, {})
        if list(PARTS).index(name) > list(PARTS).index(last):
            pytest.fail(f"{name} was not run, as {last} did not end well", pytrace=False)
        if name == last and (failed or silent):
            pytest.fail("; ".join([*failed, *(f"rank {r} did not end {name} within {PART:g} s" for r in silent)]), pytrace=False)
        return [part[r] for r in range(COUNT)]

    return take


@pytest.mark.parametrize("name", WAYS)
def test_bits_are_those_of_one_gpu(name, found):
    mine, alone = zip(*found(name))
    if isinstance(mine[0], str):
        pytest.skip(mine[0])
    jobs.assert_same_bits(alone[0], jobs.together(mine))


def test_D1_a_thousand_steps_have_the_same_bits(found):
    assert found("repeat") == [0] * COUNT


def test_A3_two_thousand_replays_with_other_routes_on_every_rank(found):
    for wrong, forwards, schedules, again in found("replay"):
        assert (wrong, again) == (0, True) and forwards == schedules == REPLAYS + 2


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_F1_a_rank_that_dies_or_stops_is_named_in_time_and_memory_comes_back(how):
    processes, results = start(die, how)
    told = results.of("told", COUNT - 1, 150)
    for process in processes:
        process.kill()
    assert 1 not in told
    for rank, t in told.items():
        print(f"rank {rank}, after {t.get('seconds', 0):.1f} s: {t['sentence']}")
        assert t["sentence"].startswith("RunError") and "rank 1" in t["sentence"] and t["seconds"] < FAULT_TIMEOUT + 5
        assert not ON_GPU or t["freed"] > 0.9 * t["held"], t
