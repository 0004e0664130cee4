"""Outputs and gradients of mok.moe against float64 autograd: at most twice the error of a bf16 chain."""

import jobs
import pytest
import reference
import torch

import mok

CASES = {
    "plain": {},
    "one_token": dict(tokens=1),
    "shared": dict(shared=64),
    "shared_wider": dict(shared=192),
    "shared_gate": dict(shared=128, output_gate=True),
    "limit": dict(tokens=200, limit=1.0, shared=64),
    "combined": dict(gate_up="combined", shared=64),
    "interleaved": dict(gate_up="interleaved", shared=64, output_gate=True),
    "dropped": dict(dropped=0.3),
    "all_dropped": dict(dropped=1.1, shared=64),
    "many_routes": dict(tokens=20, experts=16, topk=9),
    "one_expert": dict(experts=1, topk=1),
    "bf16_router": dict(router_dtype=torch.bfloat16),
    "odd_widths": dict(hidden=192, width=320, tokens=77),
    "several_tiles": dict(tokens=700, experts=3),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients(name, device):
    p = reference.make(**CASES[name])
    got = jobs.solve(mok.Group.local(device), p)
    reference.assert_as_good(got, p)


@pytest.mark.parametrize("options", [dict(recompute=True), dict(save="none"), dict(save="all"), dict(save=128)], ids=str)
def test_save_policies_give_the_same_bits(options, device):
    p = reference.make(tokens=300, shared=64, output_gate=True)
    group = mok.Group.local(device)
    jobs.assert_same_bits(jobs.solve(group, p), jobs.solve(group, p, **options))


def test_per_expert_weights_give_the_same_bits(device):
    p = reference.make(shared=64, device=device)
    packed = jobs.solve(mok.Group.local(device), p)
    leaves = p.with_leaves(torch.bfloat16)
    leaves.router_weights = p.router_weights.clone().requires_grad_()
    lists = [[t.detach().clone().requires_grad_() for t in w] for w in (p.gate, p.up, p.down)]
    out = mok.moe(leaves.x, p.expert_ids, leaves.router_weights, *lists, leaves.shared_gate, leaves.shared_up, leaves.shared_down, max_tokens=64)
    out.backward(p.dout)
    assert torch.equal(out, packed["out"].to(device)) and torch.equal(leaves.x.grad.cpu(), packed["x"])
    for name, tensors in zip(("gate", "up", "down"), lists):
        assert torch.equal(torch.stack([t.grad for t in tensors]).cpu(), packed[name])


def test_frozen_experts_get_no_gradient_and_change_no_other(device):
    p = reference.make(device=device)
    packed = jobs.solve(mok.Group.local(device), p)
    lists = [[t.detach().clone().requires_grad_(e != 3) for e, t in enumerate(w)] for w in (p.gate, p.up, p.down)]
    mok.moe(p.x, p.expert_ids, p.router_weights, *lists).backward(p.dout)
    for name, tensors in zip(("gate", "up", "down"), lists):
        for e, t in enumerate(tensors):
            assert t.grad is None if e == 3 else torch.equal(t.grad.cpu(), packed[name][e])


def test_a_frozen_matrix_gets_no_gradient(device):
    p = reference.make(device=device)
    packed = jobs.solve(mok.Group.local(device), p)
    gate, up, down = p.gate.clone(), p.up.clone().requires_grad_(), p.down.clone()
    mok.moe(p.x, p.expert_ids, p.router_weights, gate, up, down).backward(p.dout)
    assert gate.grad is None and down.grad is None and torch.equal(up.grad.cpu(), packed["up"])


def test_only_the_router_learns(device):
    p = reference.make(device=device)
    packed = jobs.solve(mok.Group.local(device), p)
    w = p.router_weights.clone().requires_grad_()
    mok.moe(p.x, p.expert_ids, w, p.gate, p.up, p.down).backward(p.dout)
    assert torch.equal(w.grad.cpu(), packed["router_weights"])


def test_zero_and_negative_router_weights(device):
    p = reference.make(tokens=40)
    p.router_weights[::3, 0] = 0.0
    p.router_weights[1::3, 1] *= -2.0
    reference.assert_as_good(jobs.solve(mok.Group.local(device), p), p)


def test_backward_twice_gives_the_same(device):
    p = reference.make(shared=64, device=device)
    x = p.x.clone().requires_grad_()
    out = mok.moe(x, p.expert_ids, p.router_weights, p.gate, p.up, p.down, p.shared_gate, p.shared_up, p.shared_down)
    first = torch.autograd.grad(out, x, p.dout, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(out, x, p.dout)[0])


def test_no_second_derivative_and_it_says_so(device):
    p = reference.make(device=device)
    x = p.x.clone().requires_grad_()
    out = mok.moe(x, p.expert_ids, p.router_weights, p.gate, p.up, p.down)
    (dx,) = torch.autograd.grad(out, x, p.dout.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice|second derivative"):
        dx.sum().backward()


@pytest.mark.parametrize("order", [(1, 0), (0, 1)], ids=["layers", "microbatches"])
def test_two_forwards_share_a_workspace(order, device):
    """Layers: forward 1, forward 2, backward 2, backward 1. Microbatches of a pipeline: backwards in the order of the forwards."""
    problems, group = [reference.make(seed=s, device=device) for s in (1, 2)], mok.Group.local(device)
    alone = [jobs.solve(group, p) for p in problems]
    engine = mok.engine(group=group, hidden=128, intermediate=64, num_experts=8, topk=2, max_tokens=64)
    leaves = [p.x.clone().requires_grad_() for p in problems]
    outs = [mok.moe(x, p.expert_ids, p.router_weights, p.gate, p.up, p.down, engine=engine, layer=i) for i, (x, p) in enumerate(zip(leaves, problems))]
    for i in order:
        outs[i].backward(problems[i].dout)
    for i in (0, 1):
        assert torch.equal(outs[i].cpu(), alone[i]["out"]) and torch.equal(leaves[i].grad.cpu(), alone[i]["x"])
