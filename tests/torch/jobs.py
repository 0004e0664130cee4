"""What ranks do in tests. Module-level, so that processes can be told to do it."""

import torch

import mok
import reference


def share(total, ranks, rank):
    """Tokens [first, end) of a rank: uneven on purpose."""
    return total * rank // ranks, total * (rank + 1) // ranks


def solve(group, problem, tokens_of_rank=None, **options):
    """One forward and backward of mok.moe on this rank's part. -> its results and gradients on the CPU, by name."""
    engine = options.pop("engine", None)
    p = cut(problem, group, tokens_of_rank)
    leaves = p.with_leaves(torch.bfloat16)
    leaves.router_weights = p.router_weights.detach().clone().requires_grad_()
    weights = [leaves.gate, leaves.up, leaves.down, leaves.shared_gate, leaves.shared_up, leaves.shared_down, leaves.shared_output_gate]
    most = options.pop("max_tokens", max(problem.x.shape[0], 1))
    if engine is None:
        options.update(group=group, num_experts=problem.gate.shape[0], max_tokens=most, swiglu_limit=problem.swiglu_limit, gate_up=problem.gate_up)
    out = mok.moe(leaves.x, p.expert_ids, leaves.router_weights, *weights, engine=engine, **options)
    out.backward(p.dout)
    grads = {name: t.grad.cpu() for name, t in leaves.tensors().items() if t.grad is not None}
    return {"out": out.detach().cpu(), **grads}


def cut(problem, group, tokens_of_rank=None):
    """This rank's tokens and experts."""
    import dataclasses

    if tokens_of_rank is None:
        first, end = share(problem.x.shape[0], group.size, group.rank)
    else:
        first, end = sum(tokens_of_rank[: group.rank]), sum(tokens_of_rank[: group.rank + 1])
    begin, count = mok.expert_range(problem.gate.shape[0], group.size, group.rank)
    local = {name: getattr(problem, name)[begin : begin + count].contiguous() for name in ("gate", "up", "down") if getattr(problem, name) is not None}
    mine = {name: getattr(problem, name)[first:end].contiguous() for name in ("x", "expert_ids", "router_weights", "dout")}
    device = group.device
    return dataclasses.replace(problem, **{k: v.to(device) for k, v in {**local, **mine}.items()},
                               **{n: getattr(problem, n).to(device) for n in ("shared_gate", "shared_up", "shared_down", "shared_output_gate") if getattr(problem, n) is not None})


def together(results):
    """Ranks' results as one: tokens and experts side by side, shared gradients added up."""
    joined = {}
    for name in results[0]:
        parts = [r[name] for r in results if name in r]
        joined[name] = sum(p.double() for p in parts) if name.startswith("shared") else torch.cat(parts)
    return joined


def assert_same_bits(a, b, names=None):
    for name in names or a:
        if not name.startswith("shared"):
            assert torch.equal(a[name], b[name]), f"{name}: {(a[name] != b[name]).sum().item()} of {a[name].numel()} elements differ"


__all__ = ["assert_same_bits", "cut", "reference", "share", "solve", "together"]
