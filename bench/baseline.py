"""The MoE layer that PyTorch offers today, as the yardstick: sort the routes by expert, exchange rows by all-to-all when there are other
ranks, grouped matrix products, SwiGLU, and all of it back. Differentiable. The exchange needs the counts on the CPU: a synchronisation per call."""

import torch
import torch.distributed as dist
import torch.nn.functional as F


def _swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


swiglu = _swiglu
swiglu_kind = "eager"


def compile_swiglu(device: torch.device) -> str:
    """One kernel instead of two where torch.compile works; says which it is."""
    global swiglu, swiglu_kind
    try:
        compiled = torch.compile(_swiglu, dynamic=True)
        compiled(torch.zeros(8, 64, dtype=torch.bfloat16, device=device))
        swiglu, swiglu_kind = compiled, "compiled"
    except Exception as error:  # no C compiler, no Triton: the plain form works everywhere
        swiglu_kind = f"eager ({type(error).__name__})"
    return swiglu_kind


def _loop_mm(rows: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    ends = offsets.tolist()
    return torch.cat([rows[start:end] @ w for w, start, end in zip(weights, [0] + ends, ends)])


def _find_grouped_mm(device: torch.device):
    for function in (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None)):
        if function is None:
            continue
        try:
            rows, weights = torch.zeros(32, 64, dtype=torch.bfloat16, device=device), torch.zeros(2, 64, 64, dtype=torch.bfloat16, device=device)
            function(rows, weights.transpose(1, 2), offs=torch.tensor([16, 32], dtype=torch.int32, device=device))
            return function
        except (RuntimeError, TypeError, NotImplementedError):
            continue
    return _loop_mm


_grouped = {}


def grouped_mm(rows: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    if not len(rows):  # a rank that received nothing
        return rows @ weights[0]
    function = _grouped.get(rows.device)
    if function is None:
        function = _grouped[rows.device] = _find_grouped_mm(rows.device)
    return function(rows, weights, offsets) if function is _loop_mm else function(rows, weights, offs=offsets)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, received, sent, group):
        ctx.splits, ctx.group = (received, sent), group
        result = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
        return result

    @staticmethod
    def backward(ctx, grad):
        received, sent = ctx.splits
        result = grad.new_empty(sum(sent), grad.shape[1])
        dist.all_to_all_single(result, grad.contiguous(), sent, received, group=ctx.group)
        return result, None, None, None


def moe_layer(x, expert_ids, router_weights, gate_up, down, group=None, num_ranks=1):
    """x [T, H], expert_ids [T, K], router_weights [T, K], gate_up [El, 2I, H], down [El, H, I] -> [T, H]. All ranks have El experts."""
    tokens, topk = expert_ids.shape
    local = gate_up.shape[0]
    routes = expert_ids.reshape(-1).long()
    order = torch.argsort(routes, stable=True)
    counts = torch.bincount(routes, minlength=local * num_ranks)
    rows = x.index_select(0, order // topk)
    if num_ranks > 1:
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts, group=group)
        incoming = incoming.view(num_ranks, local)
        sent, received = torch.stack([counts.view(num_ranks, local).sum(1), incoming.sum(1)]).tolist()
        rows = _Exchange.apply(rows, received, sent, group)
        experts = torch.arange(local, device=x.device).repeat(num_ranks).repeat_interleave(incoming.reshape(-1), output_size=sum(received))
        by_expert = torch.argsort(experts, stable=True)
        rows = rows.index_select(0, by_expert)
        counts = incoming.sum(0)
    offsets = counts.cumsum(0).to(torch.int32)
    activation = swiglu if len(rows) else _swiglu  # the compiled one's backward refuses a rank that received nothing
    y = grouped_mm(activation(grouped_mm(rows, gate_up.transpose(1, 2), offsets)), down.transpose(1, 2), offsets)
    if num_ranks > 1:
        y = torch.empty_like(y).index_copy_(0, by_expert, y)
        y = _Exchange.apply(y, sent, received, group)
    y = torch.empty_like(y).index_copy_(0, order, y).view(tokens, topk, -1)
    return torch.einsum("tk,tkh->th", router_weights.to(y.dtype), y)
