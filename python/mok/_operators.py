"""The layer as PyTorch operators mok::schedule, mok::layer and mok::layer_backward, with fake implementations and autograd.

Weights travel as lists: one packed tensor [El, rows, cols] each (`packed`), or El tensors [rows, cols]. The layer is named by its engine's
handle, and a place for fused gradient accumulation by a word of _sinks; both are plain strings, so that a compiled graph can hold them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _engine, _mx, _sinks
from ._workspace import LayerGrads, LayerWeights, allocate, dense

_library = torch.library.Library("mok", "DEF")

WEIGHTS = "Tensor[] gate, Tensor[] up, Tensor[] down, Tensor? shared_gate, Tensor? shared_up, Tensor? shared_down, Tensor? shared_output_gate"
_library.define("schedule(Tensor expert_ids, str engine, int layer) -> Tensor")
_library.define("schedule_with_counts(Tensor expert_ids, str engine, int layer) -> (Tensor, Tensor, Tensor)")
_library.define(
    f"layer(Tensor x, Tensor router_weights, Tensor schedule, {WEIGHTS}, str engine, int layer, bool packed, bool keep, bool recompute, str sink) "
    "-> (Tensor out, Tensor context)"
)
_library.define(
    f"layer_backward(Tensor dout, Tensor x, Tensor router_weights, Tensor schedule, Tensor context, {WEIGHTS}, str engine, int layer, bool packed, "
    "bool recompute, bool want_router, bool[] wanted, str sink) -> (Tensor dx, Tensor drouter_weights, Tensor[] dweights)"
)

ROUTED = ("gate", "up", "down")
SHARED = ("shared_gate", "shared_up", "shared_down", "shared_output_gate")


def _layer_weights(workspace, packed: bool, backward: bool, gate, up, down, *shared) -> LayerWeights:
    """MXFP8: what the pass reads of each packed weight, quantised or kept from before. Other layouts the library quantises as it reads them, and where
    passes are given widened weights, those are made of the bf16 ones."""
    shape = workspace.shape
    routed = [(dense(w[0]) if w else None) if packed else ([dense(e) for e in w] or None) for w in (gate, up, down)]
    if shape.dtype == "mxfp8" and not workspace.keeps_wide and packed and shape.gate_up != "interleaved" and shape.weight_layout == "nk" and routed[0] is not None and routed[0].numel():
        routed = [None if w is None else _mx.cached(w, not (backward and name == "down"), backward) for name, w in zip(ROUTED, routed)]
    return LayerWeights(*routed, *(None if w is None else dense(w) for w in shared))


# --- implementations ----------------------------------------------------------------------------------------------------
def _schedule(expert_ids: Tensor, engine: str, layer: int) -> Tensor:
    return _engine.by_handle(engine).workspace(expert_ids.shape[0]).schedule(expert_ids, layer)[0]


def _schedule_with_counts(expert_ids: Tensor, engine: str, layer: int):
    schedule, local, everywhere = _engine.by_handle(engine).workspace(expert_ids.shape[0]).schedule(expert_ids, layer, counts=True)
    return schedule, local.clone(), everywhere.clone()


def _layer(x, router_weights, schedule, gate, up, down, shared_gate, shared_up, shared_down, shared_output_gate, engine, layer, packed, keep, recompute, sink):
    workspace = _engine.by_handle(engine).workspace(x.shape[0])
    weights = _layer_weights(workspace, packed, False, gate, up, down, shared_gate, shared_up, shared_down, shared_output_gate)
    out, context = workspace.forward(schedule, dense(x), router_weights, weights, keep and not recompute, layer)
    return out, context if context is not None else x.new_empty(0, dtype=torch.uint8)


def _layer_backward(dout, x, router_weights, schedule, context, gate, up, down, shared_gate, shared_up, shared_down, shared_output_gate, engine, layer, packed,
                    recompute, want_router, wanted, sink):
    workspace = _engine.by_handle(engine).workspace(x.shape[0])
    weights = _layer_weights(workspace, packed, True, gate, up, down, shared_gate, shared_up, shared_down, shared_output_gate)
    x = dense(x)
    if recompute:
        context = workspace.recompute(schedule, x, weights, layer)
    fresh, grads = _make_grads(packed, (gate, up, down), (shared_gate, shared_up, shared_down, shared_output_gate), wanted, sink)
    dx, drouter = workspace.backward(schedule, context, dense(dout), x, router_weights, weights, grads, want_router=want_router, layer=layer)
    _sinks.filled(sink)
    return dx, drouter if drouter is not None else router_weights.new_empty(0), fresh


def _make_grads(packed: bool, routed, shared, wanted, sink: str) -> tuple[list[Tensor], LayerGrads]:
    """New tensors for the wanted gradients, in order, and where each gradient goes: there, or into the sink's."""
    fresh, grads, accumulated, place = [], LayerGrads(), [], 0
    for name, tensors in zip((*ROUTED, *SHARED), (*routed, *([t] if t is not None else [] for t in shared))):
        targets = _sinks.targets(sink, name, len(tensors))
        if any(t is not None for t in targets):
            accumulated.append(name)
        for i, tensor in enumerate(tensors):
            if wanted[place + i] and targets[i] is None:
                targets[i] = torch.empty_like(tensor, memory_format=torch.contiguous_format)
                fresh.append(targets[i])
        place += len(tensors)
        if any(t is not None for t in targets):
            setattr(grads, name, targets[0] if packed or name in SHARED else targets)
    grads.accumulate = frozenset(accumulated)
    return fresh, grads


_library.impl("schedule", _schedule, "CompositeExplicitAutograd")
_library.impl("schedule_with_counts", _schedule_with_counts, "CompositeExplicitAutograd")
_library.impl("layer", _layer, "CompositeExplicitAutograd")
_library.impl("layer_backward", _layer_backward, "CompositeExplicitAutograd")


# --- fakes --------------------------------------------------------------------------------------------------------------
@torch.library.register_fake("mok::schedule", lib=_library)
def _(expert_ids, engine, layer):
    return expert_ids.new_empty(_engine.by_handle(engine).plan().schedule_bytes, dtype=torch.uint8)


@torch.library.register_fake("mok::schedule_with_counts", lib=_library)
def _(expert_ids, engine, layer):
    found = _engine.by_handle(engine)
    counts = [expert_ids.new_empty(found.shape.num_experts, dtype=torch.int64) for _ in range(2)]
    return expert_ids.new_empty(found.plan().schedule_bytes, dtype=torch.uint8), *counts


@torch.library.register_fake("mok::layer", lib=_library)
def _(x, router_weights, schedule, gate, up, down, shared_gate, shared_up, shared_down, shared_output_gate, engine, layer, packed, keep, recompute, sink):
    num_bytes = _engine.by_handle(engine).plan().context_bytes if keep and not recompute else 0
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(num_bytes, dtype=torch.uint8)


@torch.library.register_fake("mok::layer_backward", lib=_library)
def _(dout, x, router_weights, schedule, context, gate, up, down, shared_gate, shared_up, shared_down, shared_output_gate, engine, layer, packed, recompute,
      want_router, wanted, sink):
    tensors = [*gate, *up, *down, *(t for t in (shared_gate, shared_up, shared_down, shared_output_gate) if t is not None)]
    fresh = [torch.empty_like(t, memory_format=torch.contiguous_format) for t, want in zip(tensors, wanted) if want]
    drouter = torch.empty_like(router_weights, memory_format=torch.contiguous_format) if want_router else router_weights.new_empty(0)
    return torch.empty_like(x, memory_format=torch.contiguous_format), drouter, fresh


# --- autograd -----------------------------------------------------------------------------------------------------------
def _setup(ctx, inputs, output):
    x, router_weights, schedule, gate, up, down, *rest = inputs
    shared, (engine, layer, packed, keep, recompute, sink) = rest[:4], rest[4:]
    if not keep:
        raise RuntimeError("mok::layer was called with keep=False, but a gradient is wanted: call mok.moe, which decides this")
    ctx.call = (engine, layer, packed, recompute, sink)
    ctx.counts, ctx.has_shared = (len(gate), len(up), len(down)), [t is not None for t in shared]
    ctx.save_for_backward(x, router_weights, schedule, output[1], *gate, *up, *down, *(t for t in shared if t is not None))
    ctx.set_materialize_grads(False)


def _cut(values, counts):
    """values as lists of the given lengths, and what is left."""
    lists, at = [], 0
    for n in counts:
        lists.append(list(values[at : at + n]))
        at += n
    return lists, list(values[at:])


def _spread(values, present):
    """values where `present` says so, None elsewhere."""
    values = iter(values)
    return [next(values) if here else None for here in present]


def _gradients(run, saved, dout, needs_x, needs_router, needed, counts, has_shared, call):
    """-> dx, drouter_weights and one gradient, or None, for each weight tensor; `run` is the operator or what it does."""
    x, router_weights, schedule, context, *tensors = saved
    engine, layer, packed, recompute, sink = call
    lists, rest = _cut(tensors, counts)
    sunk = _sinks.sunk(sink, counts, has_shared)
    wanted = [n and not s for n, s in zip(needed, sunk)]
    dx, drouter, fresh = run(dout, x, router_weights, schedule, context, *lists, *_spread(rest, has_shared), engine, layer, packed, recompute, needs_router, wanted, sink)
    fresh = iter(fresh)
    grads = [next(fresh) if w else _sinks.dummy(sink, t) if n and s else None for t, w, n, s in zip(tensors, wanted, needed, sunk)]
    return dx if needs_x else None, drouter if needs_router else None, grads


def _backward(ctx, dout, _dcontext):
    if dout is None:
        return (*(None,) * 3, *([None] * n for n in ctx.counts), *(None,) * 10)
    needs = ctx.needs_input_grad
    needed = [n for part in needs[3:6] for n in part] + [n for n, has in zip(needs[6:10], ctx.has_shared) if has]
    dx, drouter, grads = _gradients(torch.ops.mok.layer_backward, ctx.saved_tensors, dout, needs[0], needs[1], needed, ctx.counts, ctx.has_shared, ctx.call)
    routed, shared = _cut(grads, ctx.counts)
    return dx, drouter, None, *routed, *_spread(shared, ctx.has_shared), *(None,) * 6


torch.library.register_autograd("mok::layer", _backward, setup_context=_setup, lib=_library)


def _no_second(ctx, *grads):
    raise RuntimeError("MoK has no second derivative: call backward without create_graph=True")


torch.library.register_autograd("mok::layer_backward", _no_second, setup_context=lambda ctx, inputs, output: None, lib=_library)


class _Direct(torch.autograd.Function):
    """The same without the operator: lists of tensors cost an operator with autograd some hundred microseconds a call."""

    @staticmethod
    def forward(ctx, call, counts, has_shared, x, router_weights, schedule, *tensors):
        engine, layer, packed, recompute, sink = call
        lists, rest = _cut(tensors, counts)
        out, context = _layer(x, router_weights, schedule, *lists, *_spread(rest, has_shared), engine, layer, packed, True, recompute, sink)
        ctx.call, ctx.counts, ctx.has_shared = call, counts, has_shared
        ctx.save_for_backward(x, router_weights, schedule, context, *tensors)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        needs = ctx.needs_input_grad
        dx, drouter, grads = _gradients(_layer_backward, ctx.saved_tensors, dout, needs[3], needs[4], needs[6:], ctx.counts, ctx.has_shared, ctx.call)
        return None, None, None, dx, drouter, None, *grads


def run_layer(x, router_weights, schedule, weights: list[list[Tensor]], shared: list, engine: str, layer: int, packed: bool, recompute: bool, sink: str) -> Tensor:
    """The layer with its gradients; arguments are dense and checked."""
    tensors = [*weights[0], *weights[1], *weights[2], *(t for t in shared if t is not None)]
    keep = torch.is_grad_enabled() and (x.requires_grad or router_weights.requires_grad or any(t.requires_grad for t in tensors))
    if _engine.traced(x):
        return torch.ops.mok.layer(x, router_weights, schedule, *weights, *shared, engine, layer, packed, keep, recompute, sink)[0]
    if keep:
        return _Direct.apply((engine, layer, packed, recompute, sink), [len(w) for w in weights], [t is not None for t in shared], x, router_weights, schedule, *tensors)
    return _layer(x, router_weights, schedule, *weights, *shared, engine, layer, packed, False, recompute, sink)[0]
