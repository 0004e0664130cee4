"""The layer in plain PyTorch, in any dtype: in float64 the oracle, in bfloat16 the chain whose error is the measure."""

import dataclasses

import torch
import torch.nn.functional as F

NAMES = ("x", "router_weights", "gate", "up", "down", "shared_gate", "shared_up", "shared_down", "shared_output_gate")


@dataclasses.dataclass
class Problem:
    """All ranks' tokens and all experts. gate_up as in mok.moe."""

    x: torch.Tensor
    expert_ids: torch.Tensor
    router_weights: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor | None
    down: torch.Tensor
    shared_gate: torch.Tensor | None = None
    shared_up: torch.Tensor | None = None
    shared_down: torch.Tensor | None = None
    shared_output_gate: torch.Tensor | None = None
    gate_up: str = "separate"
    swiglu_limit: float = 0.0
    dout: torch.Tensor | None = None

    def tensors(self):
        return {name: getattr(self, name) for name in NAMES if getattr(self, name) is not None}

    def on(self, device):
        """A copy of it there."""
        return dataclasses.replace(self, **{f.name: t.to(device) for f in dataclasses.fields(self) if isinstance(t := getattr(self, f.name), torch.Tensor)})

    def with_leaves(self, dtype):
        """A copy with fresh leaves in dtype (float64 for the oracle)."""
        return dataclasses.replace(self, **{name: t.detach().to(dtype).requires_grad_() for name, t in self.tensors().items()})


def make(tokens=50, hidden=128, width=64, experts=8, topk=2, shared=0, output_gate=False, gate_up="separate", limit=0.0, dropped=0.0, router_dtype=torch.float32,
         seed=0, ids=None, device="cpu"):
    g = torch.Generator().manual_seed(seed)

    def randn(*size, scale=1.0):
        return (torch.randn(*size, generator=g) * scale).to(torch.bfloat16).to(device)

    if ids is None:
        ids = torch.stack([torch.randperm(experts, generator=g)[:topk] for _ in range(tokens)]) if tokens else torch.zeros(0, topk, dtype=torch.int64)
        ids = torch.where(torch.rand(tokens, topk, generator=g) < dropped, -1, ids)
    halves = 1 if gate_up == "separate" else 2
    weights = torch.softmax(torch.randn(tokens, ids.shape[1], generator=g), -1).to(router_dtype)
    problem = Problem(randn(tokens, hidden), ids.to(device), weights.to(device), randn(experts, halves * width, hidden, scale=hidden**-0.5),
                      randn(experts, width, hidden, scale=hidden**-0.5) if halves == 1 else None, randn(experts, hidden, width, scale=width**-0.5),
                      gate_up=gate_up, swiglu_limit=limit, dout=randn(tokens, hidden))
    if shared:
        problem.shared_gate = randn(halves * shared, hidden, scale=hidden**-0.5)
        problem.shared_up = randn(shared, hidden, scale=hidden**-0.5) if halves == 1 else None
        problem.shared_down = randn(hidden, shared, scale=shared**-0.5)
        if output_gate:
            problem.shared_output_gate = randn(hidden, scale=hidden**-0.5)
    return problem


def _split(gate, up, gate_up):
    if gate_up == "combined":
        return gate.chunk(2, dim=-2)
    if gate_up == "interleaved":
        return gate[..., 0::2, :], gate[..., 1::2, :]
    return gate, up


def _limited(value, low, high):
    """value.clamp(low, high), whose gradient passes where the value, rounded to bf16, is within the limits. The layer limits gate and up after rounding them
    (docs/contract.md), as a bf16 chain does; a float64 oracle that decided before would differ from both by whole gradients of values next to a limit."""
    inside = (value.detach().bfloat16() >= low) & (value.detach().bfloat16() <= high)
    limited = value.detach().clamp(low, high)
    return torch.where(inside, value + (limited - value.detach()), limited)


def expert(x, gate, up, down, limit):
    g, u = x @ gate.T, x @ up.T
    if limit:
        g, u = _limited(g, -float("inf"), limit), _limited(u, -limit, limit)
    return (F.silu(g) * u) @ down.T


def layer(p: Problem):
    """out [T, H], differentiable; each token's terms are added in the dtype of x."""
    out = torch.zeros_like(p.x)
    if p.shared_gate is not None:
        y = expert(p.x, *_split(p.shared_gate, p.shared_up, p.gate_up), p.shared_down, p.swiglu_limit)
        out = y if p.shared_output_gate is None else torch.sigmoid(p.x @ p.shared_output_gate)[:, None] * y
    gate, up = _split(p.gate, p.up, p.gate_up)
    for e in range(p.gate.shape[0]):
        token, k = (p.expert_ids == e).nonzero(as_tuple=True)
        y = expert(p.x[token], gate[e], up[e], p.down[e], p.swiglu_limit)
        out = out.index_add(0, token, p.router_weights[token, k][:, None].to(y.dtype) * y)
    return out


def solve(p: Problem, dtype):
    """out and all gradients in dtype."""
    q = p.with_leaves(dtype)
    out = layer(q)
    out.backward(p.dout.to(dtype))
    grads = {name: t.grad if t.grad is not None else torch.zeros_like(t) for name, t in q.tensors().items()}
    return {"out": out.detach(), **grads}


def error(value, oracle):
    """Size of the difference, as a share of the oracle's."""
    norm = oracle.double().norm()
    return ((value.double() - oracle.double()).norm() / norm).item() if norm > 0 else value.double().abs().max().item() if value.numel() else 0.0


def assert_as_good(got, p: Problem, names=None):
    """Every result's error against float64 is at most twice that of the bf16 chain (and one bf16 rounding, for results without terms to add)."""
    oracle, chain = solve(p, torch.float64), solve(p, torch.bfloat16)
    for name in names or got:
        ours, theirs = error(got[name], oracle[name]), error(chain[name], oracle[name])
        assert ours <= 2 * max(theirs, 2.0**-9), f"{name}: error {ours:.3g}, that of a bf16 chain {theirs:.3g}"
