"""mok.MoE: the layer as a module."""

from __future__ import annotations

import copy
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ._engine import Engine, as_ids, find_engine
from ._group import canonical_device, find_group
from ._layer import moe
from ._sinks import Sink, has_main_grad
from ._workspace import Shape, choice, whole_number

_DTYPES = (torch.bfloat16, torch.float32, "bf16", "mxfp8")
_OPTIONS = ("ring_rows", "minibatch_rows", "minibatch_rows_bwd", "comm_sms", "comm_sms_bwd", "reserve_sms", "yield_us", "cpu_threads", "router_dtype",
            "mx_wgrad_bf16", "mx_keep_wide")  # of Shape, passed on
_EXPERTS = ("gate", "up", "down")
_SHARED = ("shared_gate", "shared_up", "shared_down", "shared_output_gate")


class Routing(NamedTuple):
    """What a call of MoE decided: for load-balancing losses and statistics."""

    expert_ids: torch.Tensor  # [T, K]
    router_weights: torch.Tensor  # [T, K], differentiable
    logits: torch.Tensor | None  # [T, E], differentiable; None where routes were given
    schedule: torch.Tensor  # opaque; may be given to another call with the same routes


class MoE(nn.Module):
    """A mixture-of-experts layer: router, experts of this rank, shared expert. Building it is collective over `group`, and so is calling it.

    hidden, intermediate, num_experts, topk    of the whole layer
    shared_intermediate   width of the shared expert, 0 for none; shared_output_gate scales it by sigmoid(<x, gate>)
    swiglu_limit          gate <= limit and -limit <= up <= limit before the activation; None for no limit
    router                "softmax" or "sigmoid" scores, or None: routes are given to each call
    normalize, scale      router weights of a token sum to 1 (or stay as scored), times scale
    router_bias           a buffer [E] added to scores for the choice only, for balancing without a loss
    group                 process group, mok.Group, or None: all experts in this process
    max_tokens            largest number of tokens of any rank in any call; needed by torch.compile and CUDA graphs
    dtype                 of the parameters: bfloat16; float32 works under autocast. "mxfp8": bfloat16 parameters, routed experts that compute on e4m3
                          in blocks of 32 (mx_wgrad_bf16=True: but for the weight gradients; mx_keep_wide=False: no widened weights are kept, on Hopper)
    gate_up               "separate": gate and up [El, I, H]; "combined": gate [El, 2I, H], gate above up; "interleaved": rows alternate
    per_expert            a parameter for each expert instead of one for all
    save                  gate/up activations kept for the backward: "ring", "all", "none" or a number of rows
    recompute             keep none, and compute them again in the backward, without routing again
    main_grad             add weight gradients to each parameter's .main_grad, where it has one
    layer                 a number, the same on all ranks, that errors name

    Parameters: gate, up [El, I, H], down [El, H, I]; router.weight [E, H]; shared_gate, shared_up [Is, H], shared_down [H, Is],
    shared_output_gate [H]. state_dict() holds them as they are: this rank's experts are first_expert, first_expert + 1, ...
    """

    def __init__(self, hidden: int, intermediate: int, num_experts: int, topk: int, *, shared_intermediate: int = 0, shared_output_gate: bool = False,
                 swiglu_limit: float | None = None, router: str | None = "softmax", normalize: bool = True, scale: float = 1.0, router_bias: bool = False, group=None,
                 max_tokens: int | None = None, dtype: torch.dtype | str = torch.bfloat16, device=None, gate_up: str = "separate", per_expert: bool = False,
                 save: str | int = "auto", recompute: bool = False, main_grad: bool = False, layer: int = 0, timeout: float | None = None, **schedule):
        super().__init__()
        if router is not None:
            choice("router", router, {"softmax": 0, "sigmoid": 1})
        if dtype not in _DTYPES:
            raise ValueError(f"dtype is {dtype!r}: it must be torch.bfloat16, torch.float32 (for calls under autocast), \"bf16\" or \"mxfp8\"")
        for name, value in (("hidden", hidden), ("intermediate", intermediate), ("num_experts", num_experts), ("topk", topk), ("layer", layer)):
            whole_number(name, value)
        for name in schedule:
            if name not in _OPTIONS:
                raise TypeError(f"there is no option {name}: besides those by name, MoE takes {', '.join(_OPTIONS)}")
        device = torch.device(device) if device is not None else torch.get_default_device()
        self._group, self._timeout = group, timeout
        self._shape = Shape(hidden=hidden, intermediate=intermediate, num_experts=num_experts, topk=topk, max_tokens=max_tokens or 0,
                            shared_intermediate=shared_intermediate, shared_gate=shared_output_gate, swiglu_limit=float(swiglu_limit or 0.0), gate_up=gate_up, save=save,
                            dtype=dtype if isinstance(dtype, str) else "bf16", **schedule)
        self.hidden, self.intermediate, self.num_experts, self.topk = hidden, intermediate, num_experts, topk
        self.scoring, self.normalize, self.scale = router, normalize, scale
        self.recompute, self.main_grad, self.layer, self.per_expert = recompute, main_grad, layer, per_expert
        self._sink: Sink | None = None
        self._engine = self._find_engine(canonical_device(None) if device.type == "meta" else device)
        self.first_expert, self.num_local_experts = self._engine.first_expert, self._engine.num_local_experts
        self._make_parameters(dtype if isinstance(dtype, torch.dtype) else torch.bfloat16, device)
        self.router = nn.Linear(hidden, num_experts, bias=False, dtype=self.parameter_dtype, device=device) if router else None
        self.register_buffer("router_bias", torch.zeros(num_experts, device=device) if router_bias else None)
        self.reset_parameters()

    # --- making ---------------------------------------------------------------------------------------------------------
    def _find_engine(self, device) -> Engine:
        return find_engine(self._shape, find_group(self._group, device, self._timeout))

    @property
    def parameter_dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.parameters())

    def _make_parameters(self, dtype, device) -> None:
        s, halves = self._shape, 1 if self._shape.gate_up == "separate" else 2
        rows = {"gate": (halves * s.intermediate, s.hidden), "up": (s.intermediate, s.hidden) if halves == 1 else None, "down": (s.hidden, s.intermediate)}
        for name, size in rows.items():
            self.register_parameter(name, None)
            if size is None:
                continue
            if self.per_expert:
                del self._parameters[name]
                setattr(self, name, nn.ParameterList([torch.empty(size, dtype=dtype, device=device) for _ in range(self.num_local_experts)]))
            else:
                setattr(self, name, nn.Parameter(torch.empty(self.num_local_experts, *size, dtype=dtype, device=device)))
        wide = s.shared_intermediate
        shared = {"shared_gate": (halves * wide, s.hidden), "shared_up": (wide, s.hidden) if halves == 1 else None, "shared_down": (s.hidden, wide)}
        for name, size in shared.items():
            setattr(self, name, nn.Parameter(torch.empty(size, dtype=dtype, device=device)) if wide and size else None)
        self.shared_output_gate = nn.Parameter(torch.empty(s.hidden, dtype=dtype, device=device)) if s.shared_gate else None
        for parameter in self.expert_parameters():
            parameter.allreduce = False  # what Megatron calls a parameter that data parallelism over all ranks must leave alone

    def expert_parameters(self) -> list[nn.Parameter]:
        """Those of this rank's experts: each rank has others. All the rest is the same on every rank of the group."""
        return [p for name in _EXPERTS for p in self._tensors(name)]

    def _tensors(self, name: str) -> list[torch.Tensor]:
        value = getattr(self, name)
        return [] if value is None else [value] if isinstance(value, torch.Tensor) else list(value)

    @torch.no_grad()
    def reset_parameters(self, std: float | None = None) -> None:
        """Normal deviates; std None: 1 / sqrt(inputs). Each expert's depend on torch's seed and its global number alone, not on how many
        ranks there are, if all ranks were seeded alike."""
        seed = int(torch.randint(2**62, (1,), device="cpu"))
        for place, name in enumerate(_EXPERTS):
            for e in range(self.num_local_experts):
                value = getattr(self, name)
                if value is not None:
                    _fill(value[e], std, seed + 3 * (self.first_expert + e) + place + 1)
        for place, name in enumerate((*_SHARED, "router")):
            value = self.router.weight if name == "router" and self.router is not None else getattr(self, name, None)
            if isinstance(value, torch.Tensor):
                _fill(value, std, seed - place - 1)
        if self.router_bias is not None:
            self.router_bias.zero_()

    def _apply(self, function, recurse=True):
        super()._apply(function, recurse)
        device = next(self.parameters()).device
        if device.type != "meta" and canonical_device(device) != self._engine.device:
            self._engine = self._find_engine(device)
        return self

    def __deepcopy__(self, memo):
        """Another layer with the same ranks and workspace."""
        result = self.__class__.__new__(self.__class__)
        memo[id(self)], memo[id(self._group)], memo[id(self._engine)], memo[id(self._sink)] = result, self._group, self._engine, None
        result.__dict__ = {name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()}
        result._sink = None
        return result

    def __getstate__(self):
        """For pickle, where the layer is of one process: whoever reads it finds the engine of its own."""
        return {**self.__dict__, "_engine": None, "_sink": None}

    def __setstate__(self, state):
        super().__setstate__(state)
        device = next(self.parameters()).device
        self._engine = self._find_engine(canonical_device(None) if device.type == "meta" else device)

    @property
    def engine(self) -> Engine:
        return self._engine

    def prepare(self) -> None:
        """Opens the workspace now instead of at the first call. Collective, blocks. Before a CUDA graph capture."""
        self._engine.prepare()
        self._current_sink()

    def extra_repr(self) -> str:
        s = self._shape
        parts = [f"{s.hidden}, {s.intermediate}, num_experts={s.num_experts}, topk={s.topk}"]
        if s.shared_intermediate:
            parts.append(f"shared_intermediate={s.shared_intermediate}")
        if self._engine.group.size > 1:
            parts.append(f"experts {self.first_expert} to {self.first_expert + self.num_local_experts - 1}")
        return ", ".join(parts)

    # --- running --------------------------------------------------------------------------------------------------------
    def forward(self, x: torch.Tensor, expert_ids: torch.Tensor | None = None, router_weights: torch.Tensor | None = None, *, mask: torch.Tensor | None = None,
                schedule: torch.Tensor | None = None, return_routing: bool = False):
        """x [..., H] -> [..., H]; with return_routing also a Routing. Routes are given as expert_ids and router_weights [..., K], or come from
        the router. mask [...]: False for tokens that go nowhere (padding): only the shared expert sees them."""
        try:
            self._check_input(x, expert_ids, router_weights, mask)
        except (TypeError, ValueError) as error:
            self._engine.refuse_layer(schedule is None, self.layer, error)
            raise
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        logits = None
        if expert_ids is None:
            ids, router_weights, logits, schedule = self._route(rows, mask)
        else:
            ids, router_weights = as_ids(expert_ids, self.topk), router_weights.reshape(-1, self.topk).to(self._shape.router_dtype)
            if mask is not None:
                ids = torch.where(mask.reshape(-1, 1), ids, -1)
            if schedule is None:
                ids, schedule = self._engine.route_once(ids, self.layer)
        values = [getattr(self, name) for name in _EXPERTS]
        if self.per_expert:
            values = [None if v is None else list(v) for v in values]
        out = moe(rows, ids, router_weights, *values, *(getattr(self, name) for name in _SHARED), engine=self._engine, schedule=schedule, recompute=self.recompute,
                  main_grad=self._current_sink(), layer=self.layer)
        out = out if x.dim() == 2 else out.reshape(x.shape)
        return (out, Routing(ids, router_weights, logits, schedule)) if return_routing else out

    def _check_input(self, x, expert_ids, router_weights, mask) -> None:
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"x is a {type(x).__name__}: it must be a tensor")
        if x.dim() < 1 or x.shape[-1] != self.hidden:
            raise ValueError(f"x is {list(x.shape)}: its last size must be {self.hidden}")
        if (expert_ids is None) != (router_weights is None):
            raise ValueError("expert_ids is given without router_weights" if router_weights is None else "router_weights is given without expert_ids")
        if expert_ids is None and self.router is None:
            raise ValueError("this layer has no router: give expert_ids and router_weights")
        for name, routes in (("expert_ids", expert_ids), ("router_weights", router_weights)):
            if routes is None:
                continue
            if not isinstance(routes, torch.Tensor):
                raise TypeError(f"{name} is a {type(routes).__name__}: it must be a tensor")
            if routes.numel() * self.hidden != x.numel() * self.topk:
                raise ValueError(f"{name} is {list(routes.shape)}: x has {x.numel() // self.hidden} tokens, each with {self.topk} routes")
        if mask is None:
            return
        if not isinstance(mask, torch.Tensor):
            raise TypeError(f"mask is a {type(mask).__name__}: it must be a tensor")
        if mask.dtype != torch.bool:
            raise TypeError(f"mask is {mask.dtype}: it must be torch.bool")
        if mask.numel() * self.hidden != x.numel():
            raise ValueError(f"mask is {list(mask.shape)}: it must be {list(x.shape[:-1])}, as x is {list(x.shape)}")

    def _route(self, rows: torch.Tensor, mask: torch.Tensor | None):
        with torch.autocast(rows.device.type, enabled=False):
            logits = F.linear(rows.float(), self.router.weight.float())
            scores = torch.softmax(logits, -1) if self.scoring == "softmax" else torch.sigmoid(logits)
            with torch.no_grad():
                choose = scores if self.router_bias is None else scores + self.router_bias
                ids = torch.topk(choose, self.topk, dim=-1).indices.to(torch.int32)
                if mask is not None:
                    ids = torch.where(mask.reshape(-1, 1), ids, -1)
            ids, schedule = self._engine.route_once(ids.contiguous(), self.layer)
            weights = scores.gather(-1, ids.clamp(min=0).long())
            if self.normalize:
                weights = weights / weights.sum(-1, keepdim=True)
            if self.scale != 1.0:
                weights = weights * self.scale
        return ids, weights, logits, schedule

    def _current_sink(self) -> Sink | None:
        if not self.main_grad:
            return None
        if torch.compiler.is_compiling():
            if self._sink is None:
                raise RuntimeError("main_grad under torch.compile: call prepare() once the parameters have their main_grad")
            return self._sink
        named = {name: self._tensors(name) for name in (*_EXPERTS, *_SHARED)}
        if self._sink is None or self._sink.shape != {name: [has_main_grad(p) for p in tensors] for name, tensors in named.items()}:
            self._sink = Sink(named)
        return self._sink


def _fill(tensor: torch.Tensor, std: float | None, seed: int) -> None:
    if tensor.device.type == "meta" or not tensor.numel():
        return
    generator = torch.Generator(tensor.device).manual_seed(seed % 2**63)
    tensor.normal_(0.0, 1.0 / math.sqrt(tensor.shape[-1]) if std is None else std, generator=generator)
