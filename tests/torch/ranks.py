"""Ranks for tests: a pool of processes over gloo that lives for the whole session, or threads of this process (on a GPU: virtual ranks).

A job is a module-level function job(group, *arguments) -> anything that pickles; it runs on every rank, and the results come in rank order.
"""

import os
import socket
import threading
import traceback

import torch
import torch.multiprocessing as multiprocessing

WORLD = 4
TIMEOUT = 60.0  # seconds a rank waits for another: long enough for a slow machine, short enough for a test
WATCHDOG = 240
GROUPS = ((0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (1, 3), (0, 2, 3), (1, 2))


class RankFailed(AssertionError):
    """A job raised on some rank."""


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def join_world(rank, world, port):
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", rank=rank, world_size=world)


def _serve(rank, port, jobs, results):
    import torch.distributed as dist

    import mok

    join_world(rank, WORLD, port)
    process_groups = {members: dist.new_group(list(members)) for members in GROUPS}
    while True:
        job = jobs.get()
        if job is None:
            os._exit(0)
        members, function, arguments, wants = job
        try:
            group = process_groups[members] if wants == "process_group" else mok._group.find_group(process_groups[members], "cpu", TIMEOUT)
            results.put((rank, True, function(group, *arguments)))
        except BaseException:
            results.put((rank, False, traceback.format_exc()))


class Pool:
    def __init__(self):
        context = multiprocessing.get_context("spawn")
        port = free_port()
        self.results = context.Queue()
        self.jobs = [context.SimpleQueue() for _ in range(WORLD)]
        self.processes = [context.Process(target=_serve, args=(r, port, self.jobs[r], self.results), daemon=True) for r in range(WORLD)]
        for p in self.processes:
            p.start()

    def run(self, members, function, arguments, wants):
        for r in members:
            self.jobs[r].put((tuple(members), function, arguments, wants))
        outcome = {}
        for _ in members:
            rank, ok, value = self.results.get(timeout=WATCHDOG)
            outcome[rank] = (ok, value)
        failures = [f"rank {r}:\n{value}" for r, (ok, value) in sorted(outcome.items()) if not ok]
        if failures:
            raise RankFailed("\n".join(failures))
        return [outcome[r][1] for r in members]

    def close(self):
        for q in self.jobs:
            q.put(None)
        for p in self.processes:
            p.join(10)


_pool = None


def processes(ranks, function, *arguments, members=None, wants="group"):
    """Runs a job on processes 0 .. ranks - 1 of the pool, or on `members`."""
    global _pool
    if _pool is None:
        _pool = Pool()
    return _pool.run(members if members is not None else tuple(range(ranks)), function, arguments, wants)


def close():
    global _pool
    if _pool is not None:
        _pool.close()
        _pool = None


def threads(ranks, function, *arguments, device="cpu"):
    """Runs a job on ranks that are threads. Backward passes stay in their rank's thread."""
    import mok

    groups, results = mok.Group.threads(ranks, device, TIMEOUT), [None] * ranks

    def run(r):
        try:
            with torch.autograd.set_multithreading_enabled(False):
                results[r] = (True, function(groups[r], *arguments))
        except BaseException:
            results[r] = (False, traceback.format_exc())

    workers = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(ranks)]
    for w in workers:
        w.start()
    for w in workers:
        w.join(WATCHDOG)
    failures = [f"rank {r}:\n{(result or (False, 'did not finish'))[1]}" for r, result in enumerate(results) if not result or not result[0]]
    if failures:
        raise RankFailed("\n".join(failures))
    return [result[1] for result in results]
