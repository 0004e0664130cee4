"""mok.moe: one MoE layer as a differentiable function."""

from __future__ import annotations

from typing import Sequence

import torch

from ._engine import Engine, as_ids, check_ids, find_engine
from ._group import find_group
from ._operators import run_layer
from ._sinks import Sink
from ._workspace import Shape

__all__ = ["moe"]

Weight = "torch.Tensor | Sequence[torch.Tensor]"


def moe(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    router_weights: torch.Tensor,
    gate: Weight,
    up: Weight | None,
    down: Weight,
    shared_gate: torch.Tensor | None = None,
    shared_up: torch.Tensor | None = None,
    shared_down: torch.Tensor | None = None,
    shared_output_gate: torch.Tensor | None = None,
    *,
    group=None,
    engine: Engine | None = None,
    schedule: torch.Tensor | None = None,
    num_experts: int | None = None,
    max_tokens: int | None = None,
    dtype: str = "bf16",
    swiglu_limit: float | None = None,
    gate_up: str = "separate",
    save: str | int = "auto",
    recompute: bool = False,
    main_grad: bool | Sink = False,
    layer: int = 0,
    timeout: float | None = None,
) -> torch.Tensor:
    """sum over k of router_weights[t, k] * expert expert_ids[t, k] of x[t], and the shared expert's output. Collective over `group`.

    x [..., H] bf16; expert_ids [..., K] int32 or int64, -1 drops a route; router_weights [..., K] fp32 or bf16, any values.
    gate, up [El, I, H] and down [El, H, I]: this rank's experts (mok.expert_range), packed or as El separate tensors; with
    gate_up="combined" gate is [El, 2I, H], gate above up, and up is None. The shared expert has gate, up [Is, H] and down [H, Is]; shared_output_gate [H]
    scales its output by sigmoid(<x, gate>). Gradients flow to x, router_weights and all weights.

    group         process group, mok.Group, or None: all experts are in this process
    engine        instead of group, num_experts, max_tokens, dtype, swiglu_limit, gate_up, save and timeout
    dtype         "bf16", or "mxfp8": the routed experts compute on e4m3 in blocks of 32; weights are bf16 and are quantised once per version
    schedule      from engine.schedule(expert_ids), to route once for several calls
    max_tokens    the largest T of any rank in any call; needed by torch.compile and CUDA graphs
    recompute     keep nothing for the backward but x and the routing: it computes gate and up again, and routes nothing again
    main_grad     weight gradients are added to each parameter's .main_grad (fp32 or bf16) where it has one
    layer         a number that ranks compare, so that a layer never meets another one
    """
    if _under_autocast(x):
        target = torch.get_autocast_dtype(x.device.type)
        if target != torch.bfloat16:
            error = TypeError(f"autocast is to {target}, but MoK computes in bfloat16: torch.autocast(\"{x.device.type}\", dtype=torch.bfloat16)")
            if engine is not None:
                engine.refuse_layer(schedule is None, layer, error)
            raise error
        x, gate, up, down, shared_gate, shared_up, shared_down, shared_output_gate = _cast(
            target, x, gate, up, down, shared_gate, shared_up, shared_down, shared_output_gate
        )
    packed = isinstance(gate, torch.Tensor)
    if engine is None:
        engine = _engine_for(x, expert_ids, router_weights, gate, shared_gate, shared_output_gate, group, num_experts, max_tokens, dtype, swiglu_limit, gate_up, save, timeout)
    weights = {"gate": _listed(gate), "up": _listed(up), "down": _listed(down)}
    shared = {"shared_gate": shared_gate, "shared_up": shared_up, "shared_down": shared_down, "shared_output_gate": shared_output_gate}
    try:
        check_arguments(engine, packed, x, expert_ids, router_weights, weights, shared)
    except (TypeError, ValueError) as error:
        engine.refuse_layer(schedule is None, layer, error)
        raise
    if main_grad and not isinstance(main_grad, Sink):
        main_grad = Sink({**weights, **{name: _listed(t) for name, t in shared.items()}})
    shape = x.shape
    x = (x if x.dim() == 2 else x.reshape(-1, shape[-1])).contiguous()
    router_weights = (router_weights if router_weights.dim() == 2 else router_weights.reshape(-1, engine.shape.topk)).contiguous()
    if schedule is None:
        _, schedule = engine.route_once(as_ids(expert_ids, engine.shape.topk), layer)
    out = run_layer(x, router_weights, schedule, [[t.contiguous() for t in tensors] for tensors in weights.values()],
                    [None if t is None else t.contiguous() for t in shared.values()], engine.handle, layer, packed, recompute, main_grad.handle if main_grad else "")
    if main_grad and not torch.compiler.is_compiling() and out.grad_fn is not None:
        out.grad_fn.mok_sink = main_grad  # as long as the graph
    return out if len(shape) == 2 else out.reshape(shape)


def _under_autocast(x) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(x.device.type)


def _listed(weight) -> list[torch.Tensor]:
    if weight is None:
        return []
    return [weight] if isinstance(weight, torch.Tensor) else list(weight)


def _cast(dtype, *values):
    def cast(value):
        if value is None:
            return None
        if isinstance(value, torch.Tensor):
            return value.to(dtype) if value.is_floating_point() else value
        return [cast(v) for v in value]

    return [cast(v) for v in values]


def _engine_for(x, expert_ids, router_weights, gate, shared_gate, shared_output_gate, group, num_experts, max_tokens, dtype, swiglu_limit, gate_up, save,
                timeout) -> Engine:
    for name, tensor in (("x", x), ("expert_ids", expert_ids), ("router_weights", router_weights)):
        _check_tensor(name, tensor)
        if tensor.dim() < 1 + (name == "expert_ids"):
            raise ValueError(f"{name} is {list(tensor.shape)}: it must be {'[..., H]' if name == 'x' else '[..., K]'}")
    if gate is None or (isinstance(gate, torch.Tensor) and gate.dim() != 3):
        raise ValueError(f"gate is {None if gate is None else list(gate.shape)}: it must be [El, I, H], or a tensor [I, H] for each expert")
    if not isinstance(gate, torch.Tensor):
        for e, tensor in enumerate(gate):
            _check_tensor(f"gate[{e}]", tensor)
    found = find_group(group, x.device, timeout)
    local = gate.shape[0] if isinstance(gate, torch.Tensor) else len(gate)
    rows = gate.shape[-2] if isinstance(gate, torch.Tensor) else gate[0].shape[0] if local else None
    if rows is None:
        raise ValueError("this rank has no experts, so that the width cannot be seen from its weights: give engine=")
    halves = 1 if gate_up == "separate" else 2
    shared = 0 if shared_gate is None else shared_gate.shape[0] // halves
    if num_experts is None:
        num_experts = local * found.size
    return find_engine(
        Shape(hidden=x.shape[-1], intermediate=rows // halves, num_experts=num_experts, topk=expert_ids.shape[-1], max_tokens=max_tokens or 0, shared_intermediate=shared,
              shared_gate=shared_output_gate is not None, swiglu_limit=float(swiglu_limit or 0.0), router_dtype=router_weights.dtype, dtype=dtype, gate_up=gate_up, save=save),
        found,
    )


def check_arguments(engine: Engine, packed: bool, x, expert_ids, router_weights, weights: dict, shared: dict) -> None:
    """Types and shapes, each refusal with the name of what is wrong. The library does not see shapes, only pointers."""
    shape, experts, device = engine.shape, engine.num_local_experts, engine.device
    hidden, width, shared_width = shape.hidden, shape.intermediate, shape.shared_intermediate
    halves = 1 if shape.gate_up == "separate" else 2
    _check("x", x, torch.bfloat16, device)
    if x.shape[-1] != hidden:
        raise ValueError(f"x is {list(x.shape)}: its last size must be {hidden}")
    _check("router_weights", router_weights, shape.router_dtype, device)
    tokens = x.numel() // hidden
    check_ids(expert_ids, shape.topk, device)
    for name, routes in (("router_weights", router_weights), ("expert_ids", expert_ids)):
        if routes.shape[-1] != shape.topk:
            raise ValueError(f"{name} is {list(routes.shape)}: its last size must be {shape.topk}")
        if routes.numel() != tokens * shape.topk:
            raise ValueError(f"{name} has {routes.numel() // shape.topk} tokens, x has {tokens}")
    wanted = {"gate": (halves * width, hidden), "up": (width, hidden) if halves == 1 else None, "down": (hidden, width)}
    for name, size in wanted.items():
        if size is not None and shape.weight_layout == "kn":
            size = size[::-1]
        _check_routed(name, weights[name], size, experts, packed, device)
    if not shared_width and (shared["shared_gate"] is not None or shared["shared_up"] is not None or shared["shared_down"] is not None):
        raise ValueError("a shared expert's weights are given, but the engine has shared_intermediate 0")
    sizes = {"shared_gate": (halves * shared_width, hidden), "shared_up": (shared_width, hidden) if halves == 1 else None, "shared_down": (hidden, shared_width)}
    for name, size in sizes.items():
        if size is not None and shape.weight_layout == "kn":
            size = size[::-1]
        _check_one(name, shared[name], size if shared_width else None, device)
    _check_one("shared_output_gate", shared["shared_output_gate"], (hidden,) if shape.shared_gate else None, device)


def _check_tensor(name: str, tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}: it must be a tensor")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} is {tensor.layout}: it must be dense")


def _check(name: str, tensor, dtype, device) -> None:
    _check_tensor(name, tensor)
    if tensor.dtype != dtype:
        raise TypeError(f"{name} is {tensor.dtype}: it must be {dtype}" + (" (or call the layer under autocast)" if dtype == torch.bfloat16 else ""))
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, the layer is on {device}")


def _check_one(name: str, tensor, size, device) -> None:
    if size is None:
        if tensor is not None:
            raise ValueError(f"{name} is given, but this layer has none")
        return
    if tensor is None:
        raise ValueError(f"{name} is missing: it must be {list(size)}")
    _check(name, tensor, torch.bfloat16, device)
    if tuple(tensor.shape) != tuple(size):
        raise ValueError(f"{name} is {list(tensor.shape)}: it must be {list(size)}")


def _check_routed(name: str, tensors: list, size, experts: int, packed: bool, device) -> None:
    if size is None:
        if tensors:
            raise ValueError(f"{name} is given, but gate and up are one matrix here")
        return
    if packed:
        _check_one(name, tensors[0] if tensors else None, (experts, *size), device)
        return
    if len(tensors) != experts:
        raise ValueError(f"{name} has {len(tensors)} experts: this rank has {experts}")
    for e, tensor in enumerate(tensors):
        _check_one(f"{name}[{e}]", tensor, size, device)
