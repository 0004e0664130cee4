"""Ranks as processes: what libmok needs from outside (mok_provider in mok.h), from torch.distributed.

Bytes are gathered over a gloo group made for this purpose, with a time limit of its own, so that nothing meets the caller's collectives. On the
CPU a rank's heap is a mapped file in /dev/shm whose name is gone before anybody uses it, so that no way of dying leaves it behind. On GPUs it is
PyTorch's symmetric memory.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import mmap
import os
import platform
import secrets
import tempfile
import warnings

import torch
import torch.distributed as dist

from . import _library as lib

RECORD_BYTES = 1024  # what ranks tell each other about a heap
_connected: dict[str, int] = {}  # providers made so far, by the name of the process group


class ProviderError(lib.RunError):
    """What went wrong on the way to the other ranks, in a sentence."""

    def __init__(self, sentence: str):
        super().__init__(sentence, lib.Status.E_ENV)


def create_provider(process_group, device: torch.device, timeout: float) -> "Provider":
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised: call init_process_group first, or use mok.Group.local for this process alone")
    process_group = dist.group.WORLD if process_group is None else process_group
    refuse_strangers(process_group)
    if not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(f"process_group is a {type(process_group).__name__}: it must be a torch.distributed.ProcessGroup or None for the world")
    return (SymmetricProvider if device.type == "cuda" else SharedProvider)(process_group, device, timeout)


def refuse_strangers(process_group) -> None:
    """What dist.new_group returns to a process that is not in the new group is no group at all."""
    if process_group is dist.GroupMember.NON_GROUP_MEMBER or (isinstance(process_group, dist.ProcessGroup) and dist.get_rank(process_group) < 0):
        raise RuntimeError("this process is not a member of the process group")


class Provider:
    """The three functions of mok_provider as methods; a subclass says where heaps come from."""

    def __init__(self, process_group, device: torch.device, timeout: float):
        self.process_group, self.device = process_group, device
        self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.timeout = datetime.timedelta(seconds=timeout)
        self.error: Exception | None = None  # of the last callback that failed
        self.broken = False  # a rank is missing: nothing can be gathered any more
        self.round = 0
        self.store, self.gloo = self._connect()
        self.heaps: dict[int, object] = {}
        self.struct = lib.Provider()
        self.struct.all_gather = lib.ALL_GATHER(self._callback(self._all_gather))
        self.struct.heap_alloc = lib.HEAP_ALLOC(self._callback(self._heap_alloc))
        self.struct.heap_free = lib.HEAP_FREE(self._callback(self._heap_free))

    def _connect(self):
        """A gloo group of these ranks alone. dist.new_group would have to be called by the whole world, or as often by each rank of it."""
        name = self.process_group.group_name
        number = _connected[name] = _connected.get(name, 0) + 1  # making groups is collective: every member counts alike
        store = dist.PrefixStore(f"mok/{name}/{number}", dist.distributed_c10d._get_default_store())
        try:
            return store, dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), self.rank, self.size, timeout=self.timeout)
        except RuntimeError as error:
            raise ProviderError(f"rank {self.rank} could not reach the {self.size} ranks of the group within {self.timeout.total_seconds():g} s "
                                f"({_first_line(error)})") from error

    def _callback(self, function):
        def call(_user, *arguments):
            try:
                function(*arguments)
                return 0
            except BaseException as error:  # nothing may escape into C
                self.error = error if isinstance(error, Exception) else RuntimeError(repr(error))
                return 1

        return call

    # --- gathering ------------------------------------------------------------------------------------------------------
    def gather(self, record: bytes) -> list[bytes]:
        """Everybody's record, in rank order. Equal lengths."""
        if self.broken:
            raise ProviderError("this group has lost a rank")
        self.round += 1
        mine = torch.frombuffer(bytearray(record), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        self._arrive()
        try:
            self.gloo.allgather([everyone], [mine]).wait(self.timeout)
        except RuntimeError as error:
            self.broken = True
            raise ProviderError(self._explain(error)) from error
        return [bytes(t.numpy()) for t in everyone]

    def _arrive(self) -> None:
        """Leaves a mark, so that the others can name who did not come."""
        self.store.set(f"{self.round}/{self.rank}", "here")
        if self.round > 2:
            self.store.delete_key(f"{self.round - 2}/{self.rank}")

    def _explain(self, error: Exception) -> str:
        try:
            absent = [r for r in range(self.size) if not self.store.check([f"{self.round}/{r}"])]
        except RuntimeError:
            return f"rank {self.rank} lost the connection to the other ranks ({_first_line(error)})"
        if absent:
            return f"rank {self.rank} waited up to {self.timeout.total_seconds():g} s for {_ranks(absent)}, which did not come ({_first_line(error)})"
        return f"a rank left while {self.size} ranks were exchanging data ({_first_line(error)})"

    def _all_gather(self, send, recv, num_bytes):
        records = self.gather(ctypes.string_at(send, num_bytes))
        ctypes.memmove(recv, b"".join(records), num_bytes * self.size)

    def exchange(self, record: dict) -> list[dict]:
        """Small facts of every rank; a fact "error" on any rank is raised on all."""
        text = json.dumps(record).encode()
        if len(text) > RECORD_BYTES:
            text = json.dumps({"error": str(record.get("error", "a record that is too long"))[: RECORD_BYTES // 8]}).encode()
        records = [json.loads(r.rstrip(b" ")) for r in self.gather(text.ljust(RECORD_BYTES))]
        for rank, r in enumerate(records):
            if r.get("error"):
                raise ProviderError(f"rank {rank}: {r['error']}")
        return records

    # --- heaps ----------------------------------------------------------------------------------------------------------
    def _heap_alloc(self, num_bytes, peers):
        for rank, address in enumerate(self.make_heap(num_bytes)):
            peers[rank] = address

    def _heap_free(self, own):
        self.drop_heap(own)

    def make_heap(self, num_bytes: int) -> list[int]:
        raise NotImplementedError

    def drop_heap(self, own: int) -> None:
        self.heaps.pop(own, None)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


class SharedProvider(Provider):
    """Heaps in memory that the processes of one machine share."""

    def make_heap(self, num_bytes: int) -> list[int]:
        path, own, error = None, None, None
        try:
            path, own = create_shared_file(num_bytes)
        except OSError as failure:
            error = f"no {num_bytes} bytes of shared memory: {failure}"
        try:
            records = self.exchange({"path": path, "machine": machine_id(), "error": error})
            strangers = [r for r, record in enumerate(records) if record["machine"] != records[0]["machine"]]
            if strangers:
                raise ProviderError(f"{_ranks(strangers)} and rank 0 are on different machines: on the CPU, the ranks of a group share memory")
            maps, failure = {}, None
            try:
                maps = {r: own if r == self.rank else map_shared_file(record["path"]) for r, record in enumerate(records)}
            except OSError as problem:
                failure = f"a rank's shared memory could not be mapped: {problem}"
            self.exchange({"error": failure})  # nobody takes the name away before all have opened it
        finally:
            if path:
                os.unlink(path)
        addresses = [mapped_address(maps[r]) for r in range(self.size)]
        self.heaps[addresses[self.rank]] = maps
        return addresses


def create_shared_file(num_bytes: int) -> tuple[str, mmap.mmap]:
    """A file of zeros whose bytes are really there (so that a full /dev/shm is an error here and not a signal later), mapped."""
    failure: OSError | None = None
    for folder in ("/dev/shm", tempfile.gettempdir()):
        path = os.path.join(folder, f"mok-{os.getpid()}-{secrets.token_hex(6)}")
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        except OSError as error:
            failure = error
            continue
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
            return path, mmap.mmap(descriptor, num_bytes)
        except OSError as error:
            failure = error
            os.unlink(path)
        finally:
            os.close(descriptor)
    raise failure


def map_shared_file(path: str) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)


def mapped_address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def machine_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return platform.node()


class SymmetricProvider(Provider):
    """Heaps in PyTorch's symmetric memory: one GPU per process."""

    def make_heap(self, num_bytes: int) -> list[int]:
        import torch.distributed._symmetric_memory as symmetric

        tensor, error = None, None
        try:
            tensor = symmetric.empty(num_bytes, dtype=torch.uint8, device=self.device).zero_()
        except RuntimeError as failure:
            error = f"no {num_bytes} bytes of symmetric memory on {self.device}: {_first_line(failure)}"
        self.exchange({"error": error})  # a rank without memory would keep the others waiting in the rendezvous
        enable = getattr(symmetric, "enable_symm_mem_for_group", None)
        if enable is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                enable(self.process_group.group_name)
        handle = symmetric.rendezvous(tensor, self.process_group.group_name)
        torch.cuda.synchronize(self.device)
        offsets = self.exchange({"offset": tensor.data_ptr() - handle.buffer_ptrs[self.rank]})  # and all heaps are zero from here on
        self.heaps[tensor.data_ptr()] = (tensor, handle)
        return [base + record["offset"] for base, record in zip(handle.buffer_ptrs, offsets)]
