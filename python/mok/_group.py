"""Groups: the ranks that share a layer's experts, as libmok sees them."""

from __future__ import annotations

import ctypes
import weakref
from ctypes import byref, c_int32, c_void_p

import torch

from . import _library as lib


class Group:
    """One rank's handle. Make it with `Group.local`, `Group.of` or `Group.threads`; the workspaces made from it keep it alive.

    rank, size   this rank, and how many there are
    device       where tensors of this rank live
    timeout      seconds to wait for another rank; whoever makes a group says nothing (None) to leave them to the library: MOK_TIMEOUT_MS of the
                 environment, or ten minutes
    """

    def __init__(self, handle: int, device: torch.device, timeout: float, provider=None):
        library = lib.library()
        self.handle = c_void_p(handle)
        self.device = device
        self.timeout = timeout
        self.provider = provider  # keeps the callbacks alive
        self.rank = library.mok_group_rank(self.handle)
        self.size = library.mok_group_size(self.handle)
        self._finalizer = weakref.finalize(self, library.mok_group_destroy, self.handle)
        self._finalizer.atexit = False  # the process is about to give everything back

    def __repr__(self):
        return f"mok.Group(rank {self.rank} of {self.size}, {self.device})"

    def check(self, status: int) -> None:
        """As lib.check, with what went wrong inside this group's provider."""
        if status and self.provider is not None and self.provider.error is not None:
            cause, self.provider.error = self.provider.error, None
            sentence = lib.library().mok_last_error().decode(errors="replace")
            raise lib.exception_for(status, f"{sentence}: {cause}") from cause
        lib.check(status)

    @staticmethod
    def local(device: torch.device | str | None = None, timeout: float | None = None) -> "Group":
        """A group of this process alone: all experts are here."""
        return Group.threads(1, device, timeout)[0]

    @staticmethod
    def threads(num_ranks: int, device: torch.device | str | None = None, timeout: float | None = None) -> list["Group"]:
        """Ranks as threads of this process, one group for each thread, all on `device`. On a GPU these are virtual ranks, for tests: their
        calls wait for each other on the host, so that backward passes need torch.autograd.set_multithreading_enabled(False)."""
        device, timeout = canonical_device(device), lib.timeout(timeout)
        handles = (c_void_p * max(num_ranks, 1))()
        devices = None
        if device.type == "cuda":
            torch.cuda.init()
            devices = (c_int32 * max(num_ranks, 1))(*[device.index] * num_ranks)
        lib.check(lib.library().mok_group_create_local(num_ranks, devices, handles))
        return [Group(handle, device, timeout) for handle in handles]

    @staticmethod
    def of(process_group=None, device: torch.device | str | None = None, timeout: float | None = None) -> "Group":
        """The ranks of a torch.distributed process group (None: the world), one process each. Collective over that group."""
        from ._distributed import create_provider

        device, timeout = canonical_device(device), lib.timeout(timeout)
        provider = create_provider(process_group, device, timeout)
        handle = c_void_p()
        lib.check(lib.library().mok_group_create(byref(provider.struct), provider.rank, provider.size, byref(handle)))
        return Group(handle.value, device, timeout, provider)


def canonical_device(device: torch.device | str | None) -> torch.device:
    """A device with its number. None: the current GPU if there is one, else the CPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {device}: MoK runs on cpu and cuda")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device


_groups: dict = {}


def find_group(group, device: torch.device | str | None = None, timeout: float | None = None) -> Group:
    """What the `group` argument of the public calls means: a Group; a process group; or None, this process alone. Kept for the process group's
    lifetime, so that all layers share it."""
    if isinstance(group, Group):
        return group
    device, timeout = canonical_device(device), lib.timeout(timeout)
    if group is None:
        key = (None, device, timeout)
        return _groups.get(key) or _groups.setdefault(key, Group.local(device, timeout))
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised: call init_process_group first, or give group=None for this process alone")
    from ._distributed import refuse_strangers

    refuse_strangers(group)
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group is a {type(group).__name__}: it must be a torch.distributed.ProcessGroup, a mok.Group or None")
    if dist.get_world_size(group) == 1:
        return find_group(None, device, timeout)
    key = (id(group), device, timeout)
    entry = _groups.get(key)
    if entry is None or entry[0]() is not group:
        entry = _groups[key] = (weakref.ref(group), Group.of(group, device, timeout))
    return entry[1]


def address(function_pointer) -> int:
    return ctypes.cast(function_pointer, c_void_p).value
