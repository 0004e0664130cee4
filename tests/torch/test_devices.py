"""Ranks as processes with a GPU each: the same bits as one GPU, a thousand times; graphs; ranks that die.

    MOK_TEST_DEVICE=cuda pytest tests/torch/test_devices.py        as many processes as GPUs; fewer than two: skipped
    MOK_TEST_PROCESSES=2 pytest tests/torch/test_devices.py        on the CPU, with fewer repeats; graphs are skipped
"""

import io
import os
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
REPEATS, REPLAYS = (1000, 2000) if ON_GPU else (20, 0)
FAULT_TIMEOUT = 5.0

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


def digest(results):
    return hash(tuple(bytes(t.contiguous().view(torch.uint8).numpy()) for t in results.values()))


def repeat(group):
    """-> how many different results a thousand steps have."""
    p = reference.make(tokens=128, hidden=256, width=128, experts=8, topk=3)
    engine = mok.engine(group=group, hidden=256, intermediate=128, num_experts=8, topk=3, max_tokens=128)
    return len({digest(jobs.solve(group, p, engine=engine)) for _ in range(REPEATS)})


def replay(group):
    """A captured schedule and forward, replayed with other tokens and routes each time -> wrong replays, forwards counted, a call afterwards is right."""
    p = reference.make(tokens=64)
    first, count = mok.expert_range(8, group.size, group.rank)
    every = [w.to(group.device) for w in (p.gate, p.up, p.down)]
    mine = [w[first : first + count].contiguous() for w in every]
    engine = mok.engine(group=group, hidden=128, intermediate=64, num_experts=8, topk=2, max_tokens=64)
    ids, x, w = p.expert_ids.int().to(group.device), p.x.to(group.device), p.router_weights.to(group.device)
    engine.prepare()
    wrong = 0
    with torch.no_grad():
        mok.moe(x, ids, w, *mine, engine=engine)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = mok.moe(x, ids, w, *mine, engine=engine)
        for seed in range(REPLAYS):
            q = reference.make(seed=seed * group.size + group.rank, tokens=64)
            ids.copy_(q.expert_ids)
            x.copy_(q.x)
            graph.replay()
            wrong += not torch.equal(out.clone(), mok.moe(x, ids, w, *every))
        again = torch.equal(mok.moe(x, ids, w, *mine, engine=engine), out)
    torch.cuda.synchronize(group.device)
    engine.wait()
    stats = engine.workspace(64).stats()
    return wrong, stats.forwards, stats.schedules, again


def leave(rank, results, found):
    """As bytes, because tensors would be fetched from this process later."""
    file = io.BytesIO()
    torch.save(found, file)
    results.put((rank, file.getvalue()))
    results.close()
    results.join_thread()
    if rank == 0:
        time.sleep(2.0)  # it holds the store that names the absent
    os._exit(0)


def work(rank, count, port, results):
    """Everything that needs no rank to die, in one set of processes: they take long to start."""
    ranks.join_world(rank, count, port)
    found = {}
    try:
        group = mok.Group.of(torch.distributed.group.WORLD, device_of(rank), timeout=120.0)
        for name in WAYS:
            found[name] = one_way(group, name)
        found["repeat"] = repeat(group)
        found["replay"] = replay(group) if REPLAYS else None
    except BaseException as error:
        found["error"] = f"rank {rank}: {type(error).__name__}: {error}"
    leave(rank, results, found)


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
    leave(rank, results, told)


# --- here -----------------------------------------------------------------------------------------------------------------
def start(function, *arguments):
    context, port = multiprocessing.get_context("spawn"), ranks.free_port()
    results = context.Queue()
    processes = [context.Process(target=function, args=(r, COUNT, port, *arguments, results), daemon=True) for r in range(COUNT)]
    for process in processes:
        process.start()
    return processes, results


def collect(results, count, timeout):
    return {rank: torch.load(io.BytesIO(data), weights_only=False) for rank, data in (results.get(timeout=timeout) for _ in range(count))}


@pytest.fixture(scope="module")
def found():
    processes, results = start(work)
    told = collect(results, COUNT, 540)
    for process in processes:
        process.join(30)
    assert not [f["error"] for f in told.values() if "error" in f]
    return [told[r] for r in range(COUNT)]


@pytest.mark.parametrize("name", WAYS)
def test_bits_are_those_of_one_gpu(name, found):
    mine = [f[name][0] for f in found]
    if isinstance(mine[0], str):
        pytest.skip(mine[0])
    jobs.assert_same_bits(found[0][name][1], jobs.together(mine))


def test_D1_a_thousand_steps_have_the_same_bits(found):
    assert [f["repeat"] for f in found] == [1] * COUNT


@pytest.mark.skipif(not REPLAYS, reason="CUDA graphs need GPUs")
def test_A3_two_thousand_replays_with_other_routes_on_every_rank(found):
    for wrong, forwards, schedules, again in (f["replay"] for f in found):
        assert (wrong, again) == (0, True) and forwards == schedules == REPLAYS + 2


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_F1_a_rank_that_dies_or_stops_is_named_in_time_and_memory_comes_back(how):
    processes, results = start(die, how)
    told = collect(results, COUNT - 1, 150)
    for process in processes:
        process.kill()
    assert 1 not in told
    for rank, t in told.items():
        print(f"rank {rank}, after {t.get('seconds', 0):.1f} s: {t['sentence']}")
        assert t["sentence"].startswith("RunError") and "rank 1" in t["sentence"] and t["seconds"] < FAULT_TIMEOUT + 5
        assert not ON_GPU or t["freed"] > 0.9 * t["held"], t
