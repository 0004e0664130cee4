"""Workspaces: a layer's shape and group, with the memory that its passes need, and the passes themselves on tensors.

Nothing here knows autograd. A pass allocates its outputs with torch's allocator, fills the argument struct of mok.h and calls the library on
the current stream. It never synchronises.
"""

from __future__ import annotations

import dataclasses
import weakref
from ctypes import byref, c_void_p
from typing import Sequence

import torch

from . import _library as lib
from ._group import Group
from . import _mx
from ._mx import Quantised

ALIGNMENT = 256  # of schedule and context memory
ROW_ALIGNMENT = 16  # of everything a GPU moves in bulk

Weight = "torch.Tensor | Sequence[torch.Tensor] | Quantised | None"


@dataclasses.dataclass(frozen=True)
class Shape:
    """All that must be equal on the ranks of a layer, and the few things that may differ. See mok_config in mok.h."""

    hidden: int
    intermediate: int
    num_experts: int
    topk: int
    max_tokens: int
    shared_intermediate: int = 0
    shared_gate: bool = False
    swiglu_limit: float = 0.0
    router_dtype: torch.dtype = torch.float32
    gate_up: str = "separate"
    weight_layout: str = "nk"
    dtype: str = "bf16"  # or "mxfp8": of the routed experts
    mx_wgrad_bf16: bool = False  # mxfp8: weight gradients from bf16 operands
    mx_keep_wide: bool = True  # mxfp8 on Hopper: widened weights are kept, 4 bytes for each; False: every pass widens them anew, in the workspace
    save: str | int = "auto"
    ring_rows: int = 0
    minibatch_rows: int = 0
    minibatch_rows_bwd: int = 0
    comm_sms: int = 0
    comm_sms_bwd: int = 0
    reserve_sms: int = 0
    cpu_threads: int = 0
    yield_us: int = 0

    def config(self, device_type: str, timeout: float) -> lib.Config:
        c = lib.Config()
        for name in ("hidden", "intermediate", "num_experts", "topk", "max_tokens", "shared_intermediate", "ring_rows", "minibatch_rows", "minibatch_rows_bwd",
                     "comm_sms", "comm_sms_bwd", "reserve_sms", "cpu_threads", "yield_us"):
            setattr(c, name, value := whole_number(name, getattr(self, name)))
            if getattr(c, name) != value:
                raise ValueError(f"{name} is {value}: it must fit {8 * type(c).__dict__[name].size} bits")
        c.shared_gate = bool(self.shared_gate)
        c.mx_wgrad_bf16 = bool(self.mx_wgrad_bf16)
        c.mx_wide_given = bool(self.mx_keep_wide) and self.dtype == "mxfp8"
        c.swiglu_limit = self.swiglu_limit or 0.0
        c.router_dtype = choice("router_dtype", self.router_dtype, {torch.float32: lib.FP32, torch.bfloat16: lib.BF16})
        c.dtype = choice("dtype", self.dtype, {"bf16": lib.BF16, torch.bfloat16: lib.BF16, "mxfp8": lib.MXFP8})
        c.gate_up = choice("gate_up", self.gate_up, lib.GATE_UP)
        c.weight_layout = choice("weight_layout", self.weight_layout, lib.WEIGHT_LAYOUT)
        if isinstance(self.save, str):
            c.save = choice("save", self.save, lib.SAVE)
        else:
            c.save, c.save_rows = lib.SAVE_ROWS, whole_number("save", self.save)
        c.backend = choice("device", device_type, lib.BACKEND)
        c.timeout_ms = round(1000 * timeout)
        return c


def whole_number(name: str, value) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} is {value!r}: it must be a whole number")
    return value.__index__()


def choice(name: str, value, choices: dict) -> int:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}: it must be one of {', '.join(str(c) for c in choices)}")
    return choices[value]


fill: int | None = None  # for tests: what new schedule and context memory is filled with


def allocate(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Bytes at a multiple of ALIGNMENT. torch's GPU allocator gives that; on the CPU numpy's memory is cut to it, so that the tensor starts its storage."""
    if device.type == "cuda":
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    else:
        import numpy

        larger = numpy.empty(num_bytes + ALIGNMENT, dtype=numpy.uint8)
        start = -larger.ctypes.data % ALIGNMENT
        memory = torch.from_numpy(larger[start : start + num_bytes])
    return memory if fill is None else memory.fill_(fill)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy where it must be (a schedule or context that was moved off and back by somebody else's allocator)."""
    if tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    copy = allocate(tensor.numel(), tensor.device)
    copy.copy_(tensor)
    return copy


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """As the library reads it: row-major without gaps, and aligned for bulk copies."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % ROW_ALIGNMENT == 0 else tensor.clone()


@dataclasses.dataclass
class LayerWeights:
    """The weights of this rank. A routed weight is one tensor [El, rows, cols] or a sequence of El tensors [rows, cols], or Quantised; shapes are in mok.h."""

    gate: Weight = None
    up: Weight = None
    down: Weight = None
    shared_gate: torch.Tensor | None = None
    shared_up: torch.Tensor | None = None
    shared_down: torch.Tensor | None = None
    shared_output_gate: torch.Tensor | None = None


@dataclasses.dataclass
class LayerGrads:
    """Where weight gradients go, as LayerWeights; None (also for a single expert) means not wanted. bf16 or fp32."""

    gate: Weight = None
    up: Weight = None
    down: Weight = None
    shared_gate: torch.Tensor | None = None
    shared_up: torch.Tensor | None = None
    shared_down: torch.Tensor | None = None
    shared_output_gate: torch.Tensor | None = None
    accumulate: frozenset = frozenset()  # names of those that are added to


class Workspace:
    """One mok_workspace. Creating it is collective over the group and blocks; so is closing it."""

    def __init__(self, shape: Shape, group: Group):
        library = lib.library()
        self.shape, self.group, self.device = shape, group, group.device
        handle, self.config, self.plan = c_void_p(), lib.Config(), lib.Plan()
        config = shape.config(self.device.type, group.timeout)
        refuse_capture(self.device)
        with on_device(self.device):
            group.check(library.mok_workspace_create(group.handle, byref(config), byref(handle)))
        self.handle = handle
        lib.check(library.mok_workspace_config(handle, byref(self.config)))
        lib.check(library.mok_workspace_plan(handle, byref(self.plan)))
        self.first_expert, self.num_experts = self.plan.experts_first, self.plan.experts_count
        self.keeps_wide = bool(self.plan.wide_bytes and self.config.mx_wide_given)  # passes are given widened weights
        self._library, self._tables, self._structs, self._captured = library, {}, {}, []
        # Without other ranks nobody needs to be met: it goes with the object. With other ranks only close() may end it, as
        # garbage collection comes at a different time on each rank.
        self._finalizer = weakref.finalize(self, library.mok_workspace_destroy, handle) if group.size == 1 else None
        if self._finalizer:
            self._finalizer.atexit = False

    def __repr__(self):
        return f"mok.Workspace({self.shape}, {self.group})"

    def close(self) -> None:
        """Collective. What it holds is given back; tensors made with it can no longer be used."""
        if self.handle:
            handle, self.handle = self.handle, None
            if self._finalizer:
                self._finalizer.detach()
            lib.library().mok_workspace_destroy(handle)

    # --- passes ---------------------------------------------------------------------------------------------------------
    def stream(self) -> int | None:
        return _raw_stream(self.device.index) if self.device.type == "cuda" else None

    def schedule(self, expert_ids: torch.Tensor, layer: int = 0, counts: bool = False) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """expert_ids [T, K] int32 -> the routing; with `counts` also routes per expert [E] int64, of this rank's tokens and of all ranks'."""
        memory = allocate(self.plan.schedule_bytes, self.device)
        local = everywhere = None
        args = lib.ScheduleArgs(layer=layer, num_tokens=expert_ids.shape[0], expert_ids=expert_ids.data_ptr(), schedule=memory.data_ptr())
        if counts:
            local, everywhere = torch.empty(2, self.shape.num_experts, dtype=torch.int64, device=self.device)
            args.tokens_per_expert_local, args.tokens_per_expert_global = local.data_ptr(), everywhere.data_ptr()
        self._call("mok_schedule", byref(args))
        return memory, local, everywhere

    def forward(self, schedule, x, router_weights, weights: LayerWeights, context: bool, layer: int = 0, out: torch.Tensor | None = None):
        """-> out [T, H] bf16, and the context for a backward or None."""
        args, reference = self._prepared(lib.ForwardArgs, weights)
        schedule = self._block("schedule", schedule, self.plan.schedule_bytes, lib.CALL_FORWARD, layer)
        out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
        saved = allocate(self.plan.context_bytes, self.device) if context else None
        args.layer, args.num_tokens, args.schedule, args.x = layer, x.shape[0], schedule.data_ptr(), x.data_ptr()
        args.router_weights, args.out, args.context = router_weights.data_ptr(), out.data_ptr(), saved.data_ptr() if context else None
        wide = _mx.wide(self, weights, False) if self.keeps_wide else None
        args.wide = _address(wide)
        self._call("mok_forward", reference)
        return out, saved

    def recompute(self, schedule, x, weights: LayerWeights, layer: int = 0) -> torch.Tensor:
        """-> the context that the forward would have made."""
        args, reference = self._prepared(lib.ForwardArgs, weights)
        schedule, saved = self._block("schedule", schedule, self.plan.schedule_bytes, lib.CALL_RECOMPUTE, layer), allocate(self.plan.context_bytes, self.device)
        args.layer, args.num_tokens, args.schedule, args.x, args.context = layer, x.shape[0], schedule.data_ptr(), x.data_ptr(), saved.data_ptr()
        args.router_weights = args.out = None
        wide = _mx.wide(self, weights, False) if self.keeps_wide else None
        args.wide = _address(wide)
        self._call("mok_recompute", reference)
        return saved

    def backward(self, schedule, context, dout, x, router_weights, weights: LayerWeights, grads: LayerGrads, *, want_router: bool = True,
                 parts: int = lib.BACKWARD_ALL, layer: int = 0):
        """-> dx [T, H] and drouter_weights [T, K] (None unless wanted); fills `grads`."""
        args, reference = self._prepared(lib.BackwardArgs, weights)
        schedule = self._block("schedule", schedule, self.plan.schedule_bytes, lib.CALL_BACKWARD, layer)
        context = self._block("context", context, self.plan.context_bytes, lib.CALL_BACKWARD, layer)
        args.layer, args.num_tokens, args.schedule, args.context = layer, x.shape[0], schedule.data_ptr(), context.data_ptr()
        args.dout, args.x, args.router_weights, args.parts = dout.data_ptr(), x.data_ptr(), router_weights.data_ptr(), parts
        args.grads = lib.Grads()
        alive = self._point_grads(args.grads, grads)
        dx = drouter = args.dx = args.drouter_weights = None
        if parts != lib.BACKWARD_WEIGHTS:
            dx = torch.empty_like(x, memory_format=torch.contiguous_format)
            args.dx = dx.data_ptr()
            if want_router:
                drouter = torch.empty_like(router_weights, memory_format=torch.contiguous_format)
                args.drouter_weights = drouter.data_ptr()
        replays = self.plan.saved_rows < self.plan.capacity_rows
        wide = _mx.wide(self, weights, False) if self.keeps_wide and replays else None
        wide_dgrad = _mx.wide(self, weights, True) if self.keeps_wide else None
        args.wide, args.wide_dgrad = _address(wide), _address(wide_dgrad)
        self._call("mok_backward", reference)
        del alive
        return dx, drouter

    def wide_layout(self) -> tuple:
        """What the memory of widen() depends on, but for the weights."""
        return self.num_experts, self.shape.hidden, self.shape.intermediate, self.shape.gate_up

    def widen(self, weights: LayerWeights, dgrad: bool) -> torch.Tensor:
        """MXFP8 on Hopper: the routed weights as products read them, for the forward or for dgrad; what is None is left out."""
        memory, args = allocate(self.plan.wide_bytes, self.device), lib.MxWidenArgs()
        alive = [self._point(getattr(args.weights, name), getattr(weights, name)) for name in ("gate", "up", "down")]
        setattr(args, "wide_dgrad" if dgrad else "wide", memory.data_ptr())
        self._call("mok_mx_widen", byref(args))
        del alive
        return memory

    def refuse(self, call: int, layer: int, why: Exception) -> None:
        """This rank will not make the call (lib.CALL_...) that the others make next: theirs fails with this rank's name and reason."""
        if self.handle is not None:
            self._library.mok_refuse(self.handle, call, layer, str(why).encode(), self.stream())

    def _handle(self) -> c_void_p:
        if self.handle is None:
            raise ValueError("this workspace is closed")
        return self.handle

    def _block(self, name: str, memory: torch.Tensor, num_bytes: int, call: int | None = None, layer: int = 0) -> torch.Tensor:
        """Schedule or context memory, which the library knows by its address alone. call: the collective call that it is for."""
        if memory.dtype != torch.uint8 or memory.numel() < num_bytes or memory.device != self.device or not memory.is_contiguous():
            error = ValueError(f"{name} is {list(memory.shape)} of {memory.dtype} on {memory.device}: it must be the {num_bytes} bytes on {self.device} that a call "
                               "of this engine returned")
            if call is not None:
                self.refuse(call, layer, error)
            raise error
        return aligned(memory)

    def _call(self, name: str, reference) -> None:
        status = getattr(self._library, name)(self._handle(), reference, self.stream())
        if status:
            lib.check(status)

    # --- pointers -------------------------------------------------------------------------------------------------------
    def _prepared(self, kind, weights: LayerWeights):
        """An argument struct with these weights in place, and a reference to it. Filling in pointers is most of what a call costs Python, so structs
        are kept by the addresses in them; each call overwrites all other fields."""
        key = (kind, _address(weights.gate), _address(weights.up), _address(weights.down), _address(weights.shared_gate), _address(weights.shared_up),
               _address(weights.shared_down), _address(weights.shared_output_gate))
        found = self._structs.get(key)
        if found is None:
            args = kind()
            alive = [self._point(getattr(args.weights, name), getattr(weights, name)) for name in lib.WEIGHT_NAMES]
            args.weights.shared_output_gate = key[-1]
            if len(self._structs) > 256:
                self._structs.clear()
            found = self._structs[key] = (args, byref(args), [t for t in alive if t is not None])
        self._keep_captured(found[2])
        return found[0], found[1]

    def _table(self, pointers: tuple) -> torch.Tensor:
        """Pointers in memory that the backend can address. Made once per set of addresses."""
        table = self._tables.get(pointers)
        if table is None:
            table = torch.tensor(pointers, dtype=torch.int64).to(self.device)
            if len(self._tables) > 256:
                self._tables.clear()
            self._tables[pointers] = table
        self._keep_captured([table])
        return table

    def _keep_captured(self, tables: list) -> None:
        """What a captured graph will read lives as long as the workspace."""
        if tables and self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._captured.extend(tables)

    def _point(self, to, weight) -> torch.Tensor | None:
        """Fills a mok_weight or mok_grad; returns the table of pointers that it now points to, if it does."""
        address = _address(weight)
        if isinstance(weight, Quantised):
            to.packed, to.scales, to.transposed, to.transposed_scales = address[1:]
        elif not isinstance(address, tuple):
            to.packed = address
        elif address:
            table = self._table(address)
            to.experts = table.data_ptr()
            return table
        return None

    def _point_grads(self, to: lib.Grads, grads: LayerGrads) -> list:
        alive = []
        for name in (*lib.WEIGHT_NAMES, "shared_output_gate"):
            grad = getattr(grads, name)
            if grad is None:
                continue
            target = getattr(to, name)
            alive.append(self._point(target, grad))
            first = grad if isinstance(grad, torch.Tensor) else next((g for g in grad if g is not None), None)
            target.dtype = lib.FP32 if first is not None and first.dtype == torch.float32 else lib.BF16
            target.accumulate = name in grads.accumulate
        return alive

    # --- observation ----------------------------------------------------------------------------------------------------
    def wait(self) -> None:
        """Blocks until all work is done; raises its first error."""
        self.group.check(lib.library().mok_wait(self._handle()))

    def stats(self) -> lib.Stats:
        stats = lib.Stats()
        self.group.check(lib.library().mok_get_stats(self._handle(), byref(stats)))
        return stats

    def schedule_info(self, schedule: torch.Tensor) -> lib.ScheduleInfo:
        info = lib.ScheduleInfo()
        lib.check(lib.library().mok_schedule_query(self._handle(), self._block("schedule", schedule, self.plan.schedule_bytes).data_ptr(), byref(info)))
        return info


def _address(weight):
    if weight is None:
        return None
    if isinstance(weight, torch.Tensor):
        return weight.data_ptr()
    if isinstance(weight, Quantised):
        return ("quantised", *(None if t is None else t.data_ptr() for t in weight.tensors()))
    return tuple(0 if w is None else w.data_ptr() for w in weight)


def _current_stream(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _current_stream)


class on_device:
    """The device as the current one, also for ctypes calls; nothing on the CPU."""

    def __init__(self, device: torch.device):
        self.guard = torch.cuda.device(device) if device.type == "cuda" else None

    def __enter__(self):
        if self.guard:
            self.guard.__enter__()

    def __exit__(self, *error):
        if self.guard:
            self.guard.__exit__(*error)


def refuse_capture(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a MoK workspace cannot be created while a CUDA graph is being captured: call prepare() (or run the layer once) before the capture")
