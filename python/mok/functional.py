"""The calls of the published MoK, by its names and with its meanings, on this library: a workspace made by the caller, a schedule per routing,
explicit forward, recompute and backward. docs/from_published_mok.md says what differs. New code is better served by mok.moe and mok.MoE.

What the published system limits and this one does not: number of ranks, experts that ranks do not divide, token counts (any, and different on
each rank), widths (multiples of 64), capacity (nothing overflows), dropped routes (-1), no shared expert or one of another width.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Sequence

import torch

from . import _library as lib
from ._engine import Engine, find_engine
from ._group import find_group
from ._mx import Quantised, from_tuple, split_rows
from ._row_table import RowTable, read_table
from ._workspace import LayerGrads, LayerWeights, Shape

__all__ = ["MoKConfig", "MoKForwardContext", "MoKSchedule", "MoKWorkspace", "backward", "build_schedule", "clear_workspace_cache", "create_workspace", "forward",
           "get_workspace", "recompute_forward_context", "validate_inputs", "validate_workspace_args"]


# --- configuration ------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class MoKConfig:
    """Only speed and memory depend on it, never a result. The capacity multiplier and the chunk size are checked and not needed."""

    fwd_num_comm_sms: int = 40
    bwd_num_comm_sms: int = 28
    minibatch_size: int = 4096
    macrobatch_size: int = 131072
    schedule_capacity_multiplier: float = 0.5
    all_gather_top_experts_chunk_bytes: int = 2048


def _is_int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_config(config: MoKConfig, device: torch.device) -> None:
    if not isinstance(config, MoKConfig):
        raise TypeError(f"config is a {type(config).__name__}: it must be a MoKConfig")
    for name in ("fwd_num_comm_sms", "bwd_num_comm_sms"):
        value = getattr(config, name)
        if not _is_int(value) or value <= 0 or value % 2:
            raise ValueError(f"{name} is {value!r}: it must be a positive even number")
        if device.type == "cuda" and value >= torch.cuda.get_device_properties(device).multi_processor_count:
            raise ValueError(f"{name} is {value}: {device} has {torch.cuda.get_device_properties(device).multi_processor_count} multiprocessors")
    if not _is_int(config.minibatch_size) or config.minibatch_size <= 0 or config.minibatch_size % 256:
        raise ValueError(f"minibatch_size is {config.minibatch_size!r}: it must be a positive multiple of 256")
    if not _is_int(config.macrobatch_size) or config.macrobatch_size <= 0 or config.macrobatch_size % config.minibatch_size:
        raise ValueError(f"macrobatch_size is {config.macrobatch_size!r}: it must be a positive multiple of minibatch_size, {config.minibatch_size}")
    multiplier = config.schedule_capacity_multiplier
    if isinstance(multiplier, bool) or not isinstance(multiplier, (int, float)) or not math.isfinite(multiplier) or multiplier <= 0:
        raise ValueError(f"schedule_capacity_multiplier is {multiplier!r}: it must be a finite positive number")
    chunk = config.all_gather_top_experts_chunk_bytes
    if not _is_int(chunk) or chunk <= 0 or chunk % 16:
        raise ValueError(f"all_gather_top_experts_chunk_bytes is {chunk!r}: it must be a positive multiple of 16")


def _swiglu_limit(limit) -> float:
    if limit is None:
        return 0.0
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not math.isfinite(limit) or limit < 0:
        raise ValueError(f"swiglu_limit is {limit!r}: it must be None or a number from 0 on")
    return float(limit) or 1e-38  # 0 means "no limit" to the library, and "nothing passes" here


# --- workspace ----------------------------------------------------------------------------------------------------------
class MoKWorkspace:
    """Who takes part and how many tokens there can be. The memory itself is made at the first call that knows the experts' width."""

    def __init__(self, config: MoKConfig, group, device: torch.device, num_local_tokens: int, hidden_size: int, topk: int):
        self.config, self.process_group, self.device = config, group, device
        self.group = find_group(group, device)
        self.num_local_tokens, self.hidden_size, self.topk = num_local_tokens, hidden_size, topk
        self.max_tokens = max(num_local_tokens, 1)
        self._experts: dict[int, int] = {}
        if self.group.size > 1:
            records = self.group.provider.exchange({"T": num_local_tokens, "H": hidden_size, "K": topk})
            for rank, record in enumerate(records):
                if (record["H"], record["K"]) != (records[0]["H"], records[0]["K"]):
                    raise ValueError(f"hidden_size and topk are {records[0]['H']} and {records[0]['K']} on rank 0, but {record['H']} and {record['K']} on rank {rank}")
            self.max_tokens = max(1, *(record["T"] for record in records))

    def total_experts(self, num_local_experts: int) -> int:
        """Experts of all ranks. Ranks tell each other once."""
        if num_local_experts not in self._experts:
            counts = [num_local_experts]
            if self.group.size > 1:
                counts = [r["experts"] for r in self.group.provider.exchange({"experts": num_local_experts})]
            total = sum(counts)
            for rank, count in enumerate(counts):
                wanted = lib.expert_range(total, self.group.size, rank)[1] if total else 1
                if count != wanted:
                    raise ValueError(f"num_local_experts is {count} on rank {rank}: of {total} experts on {self.group.size} ranks it has {wanted}")
            self._experts[num_local_experts] = total
        return self._experts[num_local_experts]

    def engine(self, config: MoKConfig, num_experts: int, width: int, shared: int, gate: bool, combined: bool, limit: float, router_dtype,
               dtype: str = "bf16") -> Engine:
        ring = -(-min(config.macrobatch_size, self.max_tokens * self.group.size * self.topk + num_experts * 127) // 128) * 128
        minibatch = min(config.minibatch_size, max(ring // 2 // 128, 1) * 128)
        shape = Shape(hidden=self.hidden_size, intermediate=width, num_experts=num_experts, topk=self.topk, max_tokens=self.max_tokens, shared_intermediate=shared,
                      shared_gate=gate, swiglu_limit=limit, router_dtype=router_dtype, gate_up="combined" if combined else "separate", ring_rows=max(ring, 2 * minibatch),
                      minibatch_rows=minibatch, minibatch_rows_bwd=minibatch, comm_sms=config.fwd_num_comm_sms, comm_sms_bwd=config.bwd_num_comm_sms, dtype=dtype)
        return find_engine(shape, self.group)


def validate_workspace_args(config, group, *, device, num_local_tokens, hidden_size, topk) -> None:
    if not isinstance(device, torch.device):
        raise TypeError(f"device is a {type(device).__name__}: it must be a torch.device")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {device}: it must be a cuda or cpu device")
    if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        raise ValueError(f"device is {device}, but the current device is cuda:{torch.cuda.current_device()}")
    if group is not None:
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError("torch.distributed is not initialised")
        from ._distributed import refuse_strangers

        refuse_strangers(group)
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"group is a {type(group).__name__}: it must be a ProcessGroup, or None for this process alone")
    _check_config(config, device)
    if not _is_int(num_local_tokens) or num_local_tokens < 0:
        raise ValueError(f"num_local_tokens is {num_local_tokens!r}: it must be a number from 0 on")
    if not _is_int(hidden_size) or hidden_size <= 0 or hidden_size % 64:
        raise ValueError(f"hidden_size is {hidden_size!r}: it must be a positive multiple of 64")
    if not _is_int(topk) or not 1 <= topk <= 64:
        raise ValueError(f"topk is {topk!r}: it must be from 1 to 64")


def create_workspace(config: MoKConfig, group, *, device: torch.device, num_local_tokens: int, hidden_size: int, topk: int) -> MoKWorkspace:
    """Collective over `group`."""
    validate_workspace_args(config, group, device=device, num_local_tokens=num_local_tokens, hidden_size=hidden_size, topk=topk)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return MoKWorkspace(config, group, device, num_local_tokens, hidden_size, topk)


_workspaces: dict[tuple, MoKWorkspace] = {}


def get_workspace(config: MoKConfig, group, *, device: torch.device, num_local_tokens: int, hidden_size: int, topk: int) -> MoKWorkspace:
    """As create_workspace, but made once for each set of arguments in this process."""
    validate_workspace_args(config, group, device=device, num_local_tokens=num_local_tokens, hidden_size=hidden_size, topk=topk)
    key = (getattr(group, "group_name", None), device.type, device.index, num_local_tokens, hidden_size, topk)
    if key not in _workspaces:
        _workspaces[key] = create_workspace(config, group, device=device, num_local_tokens=num_local_tokens, hidden_size=hidden_size, topk=topk)
    return _workspaces[key]


def clear_workspace_cache() -> None:
    """Forgets what get_workspace has made. Collective, as memory that other ranks read is given back."""
    from ._engine import _by_handle

    groups = {w.group for w in _workspaces.values()}
    _workspaces.clear()
    for engine in dict.fromkeys(_by_handle.values()):
        if engine.group in groups:
            engine.close()


# --- schedule -----------------------------------------------------------------------------------------------------------
class MoKSchedule:
    """A routing. The library's own form is made by the first call that uses it, once for each engine, and kept.

    peer_rank i32 [C] (-1: padding), peer_token_idx i32 [C] (token * topk + k), num_tokens i32 [1] (padding included), tokens_per_expert
    i32 [El] (padding included) describe this rank's rows in this library's order: see docs/contract.md. Reading them is collective and slow.
    """

    def __init__(self, workspace: MoKWorkspace, config: MoKConfig, expert_ids: torch.Tensor, num_local_experts: int, num_experts: int):
        self.workspace, self.config, self.expert_ids = workspace, config, expert_ids
        self.num_local_experts, self.num_experts = num_local_experts, num_experts
        self._made: dict[str, torch.Tensor] = {}
        self._table: RowTable | None = None

    def made_for(self, engine: Engine) -> torch.Tensor:
        if engine.handle not in self._made:
            self._made[engine.handle] = engine.schedule(self.expert_ids)
        return self._made[engine.handle]

    def _rows(self) -> RowTable:
        if self._table is None:
            engine = next((e for e in map(_engine_of, self._made)), None)
            if engine is None:
                engine = self.workspace.engine(self.config, self.num_experts, 64, 0, False, False, 0.0, torch.float32)
            self._table = read_table(engine, self.made_for(engine))
        return self._table

    peer_rank = property(lambda self: self._rows().rank)
    peer_token_idx = property(lambda self: self._rows().slot)
    num_tokens = property(lambda self: self._rows().num_rows)
    tokens_per_expert = property(lambda self: self._rows().rows_per_expert)


def _engine_of(handle: str) -> Engine:
    from ._engine import by_handle

    return by_handle(handle)


def build_schedule(workspace: MoKWorkspace, config: MoKConfig, top_experts: torch.Tensor, *, num_local_experts: int) -> MoKSchedule:
    """top_experts [T, K] int64 or int32; -1 drops a route. Collective when a number of experts is seen for the first time."""
    if not isinstance(workspace, MoKWorkspace):
        raise TypeError(f"workspace is a {type(workspace).__name__}: it must be a MoKWorkspace")
    _check_config(config, workspace.device)
    if not isinstance(top_experts, torch.Tensor):
        raise TypeError(f"top_experts is a {type(top_experts).__name__}: it must be a tensor")
    if top_experts.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"top_experts is {top_experts.dtype}: it must be int64 or int32")
    if top_experts.dim() != 2 or top_experts.shape[1] != workspace.topk or top_experts.shape[0] > workspace.max_tokens:
        raise ValueError(f"top_experts is {list(top_experts.shape)}: it must be [T, {workspace.topk}] with T at most {workspace.max_tokens}")
    if top_experts.device != workspace.device:
        raise ValueError(f"top_experts is on {top_experts.device}, the workspace on {workspace.device}")
    if not top_experts.is_contiguous():
        raise ValueError("top_experts is not contiguous")
    if not _is_int(num_local_experts) or num_local_experts < 0:
        raise ValueError(f"num_local_experts is {num_local_experts!r}: it must be a number from 0 on")
    total = workspace.total_experts(num_local_experts)
    return MoKSchedule(workspace, config, top_experts.clone(), num_local_experts, total)


# --- passes -------------------------------------------------------------------------------------------------------------
@dataclasses.dataclass
class MoKForwardContext:
    """What a forward leaves for its backward: opaque memory. It is only read, so that it serves any number of backwards. In MXFP8 gate_routed and
    up_routed are pairs of e4m3 data and scales."""

    data: torch.Tensor
    engine: Engine

    def _saved(self, name: str, columns: int):
        config = dataclasses.replace(self.engine.shape).config(self.engine.device.type, self.engine.group.timeout)
        for info in lib.buffers(config, self.engine.group.size, self.engine.group.rank):
            if info.name.decode() == name:
                memory = self.data[info.offset : info.offset + info.bytes]
                if name in ("saved_gate", "saved_up") and self.engine.shape.dtype == "mxfp8":
                    return split_rows(memory.view(-1, columns + -(-columns // 32 // 16) * 16), columns)
                return memory.view(torch.bfloat16).view(-1, columns)
        raise AttributeError(name)

    gate_routed = property(lambda self: self._saved("saved_gate", self.engine.shape.intermediate))
    up_routed = property(lambda self: self._saved("saved_up", self.engine.shape.intermediate))
    gate_shared = property(lambda self: self._saved("saved_shared_gate", self.engine.shape.shared_intermediate))
    up_shared = property(lambda self: self._saved("saved_shared_up", self.engine.shape.shared_intermediate))


_SHARED_NAMES = ("w_shared_gate", "w_shared_up", "w_shared_down")
_ROUTED_NAMES = ("w_routed_gate", "w_routed_up", "w_routed_down")


def validate_inputs(workspace: MoKWorkspace, schedule: MoKSchedule, x: torch.Tensor, router_weights: torch.Tensor | None = None,
                    grad_output: torch.Tensor | None = None) -> None:
    """TypeError for wrong types of objects, ValueError for dtypes, shapes, devices and strides."""
    if not isinstance(workspace, MoKWorkspace):
        raise TypeError(f"workspace is a {type(workspace).__name__}: it must be a MoKWorkspace")
    if not isinstance(schedule, MoKSchedule):
        raise TypeError(f"schedule is a {type(schedule).__name__}: it must be a MoKSchedule")
    if schedule.workspace is not workspace:
        raise ValueError("schedule was built for another workspace")
    tokens = schedule.expert_ids.shape[0]
    wanted = {"x": (x, (torch.bfloat16,), (tokens, workspace.hidden_size)), "router_weights": (router_weights, (torch.float32, torch.bfloat16), (tokens, workspace.topk)),
              "grad_output": (grad_output, (torch.bfloat16,), (tokens, workspace.hidden_size))}
    for name, (tensor, dtypes, size) in wanted.items():
        if tensor is None and name != "x":
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}: it must be a tensor")
        if tensor.dtype not in dtypes:
            raise ValueError(f"{name} is {tensor.dtype}: it must be {' or '.join(map(str, dtypes))}")
        if tuple(tensor.shape) != size:
            raise ValueError(f"{name} is {list(tensor.shape)}: it must be {list(size)}")
        if tensor.device != workspace.device:
            raise ValueError(f"{name} is on {tensor.device}, the workspace on {workspace.device}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous")


def _check_weight(name: str, weight, size: Sequence[int], count: int | None, device: torch.device) -> None:
    """count: experts, or None for a shared weight."""
    if isinstance(weight, tuple):
        raise ValueError(f"{name} is a tuple, which means MXFP8: only routed weights may be")
    each = weight if isinstance(weight, list) else [weight]
    if isinstance(weight, list) and len(weight) != count:
        raise ValueError(f"{name} has {len(weight)} experts: this rank has {count}")
    wanted = tuple(size) if count is None or isinstance(weight, list) else (count, *size)
    for tensor in each:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}: it must be a tensor, or a list of tensors, one per expert")
        if tensor.dtype != torch.bfloat16 or tuple(tensor.shape) != wanted or tensor.device != device or not tensor.is_contiguous():
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}: it must be contiguous bfloat16 {list(wanted)} on {device}")


def _first(weight) -> torch.Tensor | None:
    return (weight[0] if weight else None) if isinstance(weight, (list, tuple)) else weight


def _open(config, workspace, schedule, shared, routed, gate, limit, router_dtype=torch.float32, down: bool = True,
          backward: bool = False) -> tuple[Engine, LayerWeights]:
    """Checks the weights; -> the engine that these shapes mean, and the weights for it. Tuples of the routed weights mean MXFP8."""
    _check_config(config, workspace.device)
    limit = _swiglu_limit(limit)
    mx = isinstance(routed[0], tuple)
    if len({isinstance(w, tuple) for w in routed if w is not None}) > 1:
        raise TypeError("the routed weights have different precisions")
    first = _first(routed[0])
    if not isinstance(first, torch.Tensor):
        raise TypeError(f"w_routed_gate is a {type(routed[0]).__name__}: it must be a tensor, or a list of tensors, one per expert")
    combined, hidden, device, experts = routed[1] is None, workspace.hidden_size, workspace.device, schedule.num_local_experts
    halves = 2 if combined else 1
    width = first.shape[-2] // halves if first.dim() >= 2 else 0
    if width <= 0 or width % 64:
        raise ValueError(f"w_routed_gate is {list(first.shape)}: the experts' width must be a positive multiple of 64")
    has_shared = shared[0] is not None
    wide = shared[0].shape[0] // halves if has_shared and isinstance(shared[0], torch.Tensor) and shared[0].dim() == 2 else 0
    sizes = ((halves * width, hidden), None if combined else (width, hidden), (hidden, width) if down else None)
    given = []
    for name, weight, size in zip(_ROUTED_NAMES, routed, sizes):
        if size is not None and mx:
            given.append(from_tuple(name, weight, (experts, *size), device, backward))
        elif size is not None:
            _check_weight(name, weight, size, experts, device)
            given.append(weight)
        else:
            given.append(None)
    sizes = ((halves * wide, hidden), None if combined else (wide, hidden), (hidden, wide) if down else None)
    for name, weight, size in zip(_SHARED_NAMES, shared, sizes):
        if has_shared and size is not None:
            _check_weight(name, weight, size, None, device)
        elif not has_shared and weight is not None:
            raise ValueError(f"{name} is given without w_shared_gate")
    if gate is not None:
        _check_weight("w_shared_output_gate", gate, (hidden,), None, device)
    engine = workspace.engine(config, schedule.num_experts, width, wide, gate is not None, combined, limit, router_dtype, "mxfp8" if mx else "bf16")
    return engine, LayerWeights(*given, *shared, gate)


@contextlib.contextmanager
def _told(schedule, call: int):
    """What is refused inside is told to the other ranks, which would wait for this one's call: as far as it is known whose engine they mean, which is after
    the schedule's first use."""
    try:
        yield
    except (TypeError, ValueError) as error:
        made = [_engine_of(handle) for handle in schedule._made] if isinstance(schedule, MoKSchedule) and not isinstance(error, lib.Error) else []
        if len(made) == 1:
            made[0].refuse(call, 0, error)
        raise


def forward(config: MoKConfig, workspace: MoKWorkspace, schedule: MoKSchedule, x: torch.Tensor, router_weights: torch.Tensor, w_shared_gate, w_shared_up, w_shared_down,
            w_routed_gate, w_routed_up, w_routed_down, swiglu_limit: float | None = None, *, w_shared_output_gate=None) -> tuple[torch.Tensor, MoKForwardContext]:
    """Weights as in the published interface: routed weights that are tuples (data, scale) mean MXFP8. Also: shared weights None; routed weights as lists,
    one tensor per expert; gate and up as one matrix with w_routed_up None (and w_shared_up)."""
    with _told(schedule, lib.CALL_FORWARD):
        validate_inputs(workspace, schedule, x, router_weights)
        engine, weights = _open(config, workspace, schedule, (w_shared_gate, w_shared_up, w_shared_down), (w_routed_gate, w_routed_up, w_routed_down),
                                w_shared_output_gate, swiglu_limit, router_weights.dtype)
    out, context = engine.workspace(x.shape[0]).forward(schedule.made_for(engine), x, router_weights, weights, True)
    return out, MoKForwardContext(context, engine)


def recompute_forward_context(config: MoKConfig, workspace: MoKWorkspace, schedule: MoKSchedule, x: torch.Tensor, w_shared_gate, w_shared_up, w_routed_gate, w_routed_up,
                              swiglu_limit: float | None = None, *, w_shared_output_gate=None, router_dtype: torch.dtype = torch.float32) -> MoKForwardContext:
    """The context of a forward, made again from x and the schedule."""
    with _told(schedule, lib.CALL_RECOMPUTE):
        validate_inputs(workspace, schedule, x)
        engine, weights = _open(config, workspace, schedule, (w_shared_gate, w_shared_up, None), (w_routed_gate, w_routed_up, None), w_shared_output_gate,
                                swiglu_limit, router_dtype, down=False)
    return MoKForwardContext(engine.workspace(x.shape[0]).recompute(schedule.made_for(engine), x, weights), engine)


def backward(config: MoKConfig, workspace: MoKWorkspace, schedule: MoKSchedule, context: MoKForwardContext, grad_output: torch.Tensor, x: torch.Tensor,
             router_weights: torch.Tensor, w_shared_gate, w_shared_up, w_shared_down, w_routed_gate, w_routed_up, w_routed_down, swiglu_limit: float | None = None, *,
             w_shared_output_gate=None, main_grads: Sequence[torch.Tensor | None] | None = None):
    """-> d_x, d_router_weights, d_routed_gate, _up, _down, d_shared_gate, _up, _down (and d_shared_output_gate, if there is one).

    main_grads: (shared gate, routed gate, shared up, routed up, shared down, routed down), or without both up where gate and up are one matrix; fp32 or
    bf16, None for those that are not wanted there, that the gradients are added to; those are returned as None, and experts without rows are left alone.

    MXFP8: gate and up are (data, scale, transposed data, transposed scale), down is (transposed data, transposed scale)."""
    with _told(schedule, lib.CALL_BACKWARD):
        validate_inputs(workspace, schedule, x, router_weights, grad_output)
        if not isinstance(context, MoKForwardContext):
            raise TypeError(f"context is a {type(context).__name__}: it must be a MoKForwardContext")
        shared, routed = (w_shared_gate, w_shared_up, w_shared_down), (w_routed_gate, w_routed_up, w_routed_down)
        engine, weights = _open(config, workspace, schedule, shared, routed, w_shared_output_gate, swiglu_limit, router_weights.dtype, backward=True)
        if engine is not context.engine:
            raise ValueError("context was made with another configuration or other shapes: " + _difference(engine.shape, context.engine.shape))
        results, grads = _make_results(weights, main_grads)
    dx, drouter = engine.workspace(x.shape[0]).backward(schedule.made_for(engine), context.data, grad_output, x, router_weights, weights, grads)
    names = ("gate", "up", "down", "shared_gate", "shared_up", "shared_down") + (("shared_output_gate",) if w_shared_output_gate is not None else ())
    return (dx, drouter, *(results.get(name) for name in names))


def _difference(a: Shape, b: Shape) -> str:
    for field in dataclasses.fields(Shape):
        if getattr(a, field.name) != getattr(b, field.name):
            return f"{field.name} is {getattr(a, field.name)}, it was {getattr(b, field.name)}"
    return "another group"


def _make_results(weights: LayerWeights, main_grads) -> tuple[dict, LayerGrads]:
    """Fresh gradients by name, and where each goes: there, or into main_grads."""
    sinks = {}
    if main_grads is not None:
        order = ("shared_gate", "gate", "shared_up", "up", "shared_down", "down")
        if weights.up is None and len(main_grads) == 4:  # gate and up are one matrix
            order = ("shared_gate", "gate", "shared_down", "down")
        if len(main_grads) != len(order):
            raise ValueError(f"main_grads has {len(main_grads)} entries: it must have 6" + (", or 4 without the up matrices" if weights.up is None else ""))
        sinks = dict(zip(order, main_grads))
    results, grads = {}, LayerGrads()
    for field in dataclasses.fields(LayerWeights):
        weight, sink = getattr(weights, field.name), sinks.get(field.name)
        if weight is None:
            continue
        if sink is not None:
            if [tuple(t.shape) for t in _each(sink)] != _shapes(weight):
                raise ValueError(f"the main_grad of {field.name} has another shape than the weight")
            if any(t.dtype not in (torch.float32, torch.bfloat16) or not t.is_contiguous() for t in _each(sink)):
                raise ValueError(f"the main_grad of {field.name} must be contiguous float32 or bfloat16")
            setattr(grads, field.name, sink)
            grads.accumulate = grads.accumulate | {field.name}
        else:
            results[field.name] = ([torch.empty_like(t) for t in weight] if isinstance(weight, list) else torch.empty_like(weight)
                                   if isinstance(weight, torch.Tensor) else torch.empty(_shapes(weight)[0], dtype=torch.bfloat16, device=weight.transposed.device))
            setattr(grads, field.name, results[field.name])
    return results, grads


def _each(weight):
    return weight if isinstance(weight, (list, tuple)) else [weight]


def _shapes(weight) -> list[tuple]:
    """Of each tensor of the bf16 weight. The backward has the transposed form of every quantised one."""
    if isinstance(weight, Quantised):
        experts, cols, rows = weight.transposed.shape
        return [(experts, rows, cols)]
    return [tuple(t.shape) for t in _each(weight)]
