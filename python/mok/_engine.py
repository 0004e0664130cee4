"""Engines: a layer's shape and its group, and the workspaces opened for them. All layers of one shape and group share one engine."""

from __future__ import annotations

import dataclasses
import hashlib

import torch

from . import _library as lib
from . import _replay
from ._group import Group, find_group
from ._workspace import Shape, Workspace, refuse_capture

_engines: dict[tuple, "Engine"] = {}
_by_handle: dict[str, "Engine"] = {}


class Engine:
    """What operators know a layer by: `handle` is a word that a compiled graph can carry.

    With max_tokens the workspace is opened at the first call, or by prepare(), and serves up to that many tokens per rank. Without it
    (0), a process alone opens one for each power of two that it meets; several ranks agree at their first call, once, on the power of two
    above the largest of their token counts.
    """

    def __init__(self, shape: Shape, group: Group):
        self.shape, self.group, self.device = shape, group, group.device
        self.first_expert, self.num_local_experts = lib.expert_range(shape.num_experts, group.size, group.rank)
        self._open: dict[int, Workspace] = {}
        self._fixed = shape.max_tokens
        self._plan = None
        if not self._fixed:  # refuse what is wrong here and not in the middle of a step
            lib.plan(dataclasses.replace(shape, max_tokens=1).config(self.device.type, group.timeout), group.size, group.rank)
        self._name()

    def __repr__(self):
        return f"mok.Engine({self.shape}, {self.group})"

    def _name(self) -> None:
        """A new handle. Compilers keep graphs on disk and look them up by what is written in them, so everything that sizes depend on is in the word,
        and the word means the same in every process."""
        facts = [lib.version(), self.device.type, self.group.size, self.group.rank, repr(self.shape), self._fixed]
        if self._fixed:
            facts += [self.plan().schedule_bytes, self.plan().context_bytes]
        digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
        number = 0
        while f"{digest}.{number}" in _by_handle:
            number += 1
        self.handle = f"{digest}.{number}"
        _by_handle[self.handle] = self  # earlier words stay: graphs may hold them

    def plan(self) -> lib.Plan:
        """Sizes of the workspace, the schedule and the context. Needs max_tokens."""
        if not self._fixed:
            raise ValueError("max_tokens is not known: give it (torch.compile and CUDA graphs need it), or run the layer once before")
        if self._plan is None:
            self._plan = lib.plan(dataclasses.replace(self.shape, max_tokens=self._fixed).config(self.device.type, self.group.timeout), self.group.size,
                                  self.group.rank)
        return self._plan

    def prepare(self, max_tokens: int | None = None) -> Workspace:
        """Opens the workspace now. Collective, blocks; call it before a CUDA graph is captured."""
        if max_tokens:
            if self._fixed and self._fixed != max_tokens:
                raise ValueError(f"max_tokens is {max_tokens}, but this engine was made for {self._fixed}")
            self._fix(max_tokens)
        self.plan()
        return self.workspace(0)

    def workspace(self, tokens: int) -> Workspace:
        """The one for a call with so many tokens: a pure function of them, so that a schedule meets the workspace that made it."""
        most = self._fixed or self._choose(tokens)
        found = self._open.get(most)
        if found is None:
            found = self._open[most] = Workspace(dataclasses.replace(self.shape, max_tokens=most), self.group)
        return found

    def _choose(self, tokens: int) -> int:
        if self.group.size == 1:
            return _power_of_two(tokens)
        refuse_capture(self.device)
        if self.group.provider is None:
            raise ValueError("max_tokens is not given: ranks that are threads of one process need it")
        self._fix(max(_power_of_two(record["tokens"]) for record in self.group.provider.exchange({"tokens": tokens})))
        return self._fixed

    def _fix(self, max_tokens: int) -> None:
        if not self._fixed:
            self._fixed = max_tokens
            self._name()

    def schedule(self, expert_ids: torch.Tensor, layer: int = 0) -> torch.Tensor:
        """expert_ids [T, K], int32 or int64 -> the routing as an opaque tensor, for `moe(..., schedule=...)`. -1 drops a route."""
        ids = self._ids(expert_ids, layer)
        if traced(ids):
            return torch.ops.mok.schedule(ids, self.handle, layer)
        return self.workspace(ids.shape[0]).schedule(ids, layer)[0]

    def schedule_with_counts(self, expert_ids: torch.Tensor, layer: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Also routes per expert [E] int64: of this rank's tokens, and of all ranks'."""
        return torch.ops.mok.schedule_with_counts(self._ids(expert_ids, layer), self.handle, layer)

    def _ids(self, expert_ids: torch.Tensor, layer: int) -> torch.Tensor:
        try:
            check_ids(expert_ids, self.shape.topk, self.device)
        except (TypeError, ValueError) as error:
            self.refuse(lib.CALL_SCHEDULE, layer, error)
            raise
        return as_ids(expert_ids, self.shape.topk)

    def route_once(self, expert_ids: torch.Tensor, layer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """-> ids and schedule; when activation checkpointing runs a region again, those of the first run, and no rank meets another."""
        if torch.compiler.is_compiling():
            return expert_ids, self.schedule(expert_ids, layer)
        try:
            return _replay.once((self.handle, layer), lambda: (expert_ids, self.schedule(expert_ids, layer)))
        except Exception as error:
            if self.device.type == "cuda":
                self.refuse(lib.CALL_FORWARD, layer, error)  # as refuse_layer
            raise

    def refuse(self, call: int, layer: int, why: Exception) -> None:
        """This rank will not make its next call (lib.CALL_...): the other ranks' call fails at once, with this rank's name and reason. Collective, as the call
        would have been: before the first one, the workspace is opened, since the others are opening it."""
        if self.group.size == 1 or torch.compiler.is_compiling():
            return
        try:
            if not self._open:
                self._open_to_refuse(layer, why)
            for workspace in self._open.values():
                workspace.refuse(call, layer, why)
        except RuntimeError:
            pass  # the others were told in another way, or did not come; what counts here is `why`

    def refuse_layer(self, routes: bool, layer: int, why: Exception) -> None:
        """The same for a layer, whose schedule (if it `routes`) and pass are calls of their own. On GPUs the others hear of a refused schedule when they have begun
        the pass, so that is refused too: ranks stay in step, and the next layer works."""
        if routes:
            self.refuse(lib.CALL_SCHEDULE, layer, why)
        if not routes or self.device.type == "cuda":
            self.refuse(lib.CALL_FORWARD, layer, why)

    def _open_to_refuse(self, layer: int, why: Exception) -> None:
        if self._fixed:
            self.workspace(0)
        elif self.group.provider is not None:  # the others are about to agree on a token count
            self.group.provider.exchange({"tokens": 0, "error": f"refused its call of layer {layer}: {why}"})

    def wait(self) -> None:
        """Blocks until all work is done; raises what the device has found wrong."""
        for workspace in self._open.values():
            workspace.wait()

    def stats(self) -> dict[str, int]:
        """Counters of mok_stats, summed over the workspaces. Blocks."""
        total: dict[str, int] = {}
        for workspace in self._open.values():
            stats = workspace.stats()
            for name, *_ in lib.Stats._fields_[2:]:
                total[name] = total.get(name, 0) + getattr(stats, name)
        return total

    def close(self) -> None:
        """Collective. Gives the memory back; the next call opens it again."""
        opened, self._open = self._open, {}
        for workspace in opened.values():
            workspace.close()


def traced(tensor: torch.Tensor) -> bool:
    """Is somebody watching who has to see an operator: a compiler, a dispatch mode, a transform, a tensor subclass? If not, calls take the short way."""
    return (torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0 or type(tensor) not in (torch.Tensor, torch.nn.Parameter)
            or torch._C._functorch.peek_interpreter_stack() is not None)


def _power_of_two(tokens: int) -> int:
    return 1 << max(7, (tokens - 1).bit_length() if tokens > 1 else 0)


def find_engine(shape: Shape, group: Group) -> Engine:
    key = (shape, group)
    return _engines.get(key) or _engines.setdefault(key, Engine(shape, group))


def engine(group=None, device=None, timeout: float | None = None, **shape) -> Engine:
    """The engine of a shape (arguments of mok.Shape) and a group: a process group, a mok.Group, or None for this process alone."""
    shape.setdefault("max_tokens", 0)
    return find_engine(Shape(**shape), find_group(group, device, timeout))


def by_handle(handle: str) -> Engine:
    found = _by_handle.get(handle)
    if found is None:
        raise ValueError(f"there is no engine {handle!r} in this process: a compiled graph of another process?")
    return found


def close_all() -> None:
    """Collective over every group in use: gives back all workspaces."""
    for found in dict.fromkeys(_by_handle.values()):  # in the order they were made, which is the same on all ranks
        found.close()


def check_ids(expert_ids, topk: int, device: torch.device) -> None:
    if not isinstance(expert_ids, torch.Tensor):
        raise TypeError(f"expert_ids is a {type(expert_ids).__name__}: it must be a tensor")
    if expert_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"expert_ids is {expert_ids.dtype}: it must be int32 or int64")
    if expert_ids.dim() < 2 or expert_ids.shape[-1] != topk:
        raise ValueError(f"expert_ids is {list(expert_ids.shape)}: it must be [T, {topk}]")
    if expert_ids.device != device:
        raise ValueError(f"expert_ids is on {expert_ids.device}, the layer is on {device}")


def as_ids(expert_ids: torch.Tensor, topk: int) -> torch.Tensor:
    """[..., K] of either whole-number type as dense [T, K] int32; what does not fit 32 bits stays out of range."""
    ids = expert_ids if expert_ids.dim() == 2 else expert_ids.reshape(-1, topk)
    if ids.dtype == torch.int64:
        ids = ids.clamp(-(2**31), 2**31 - 1).to(torch.int32)
    return ids.contiguous()
