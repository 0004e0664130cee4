"""Operators, torch.compile, activation checkpointing, autocast."""

import jobs
import pytest
import reference
import torch
import torch._dynamo.testing
from torch.utils.checkpoint import checkpoint

import mok

OPS = torch.ops.mok


def engine_and_problem(device, **options):
    p = reference.make(device=device, **options)
    shared = p.shared_gate.shape[0] if p.shared_gate is not None else 0
    engine = mok.engine(group=mok.Group.local(device), hidden=128, intermediate=64, num_experts=8, topk=2, max_tokens=64, shared_intermediate=shared,
                        shared_gate=p.shared_output_gate is not None)
    return engine, p


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("packed", [True, False])
def test_opcheck_layer(packed, recompute, device):
    engine, p = engine_and_problem(device, shared=64, output_gate=True)
    mok._workspace.fill = 0  # opcheck compares the context too, whose unused bytes mean nothing
    leaves = p.with_leaves(torch.bfloat16)
    weights = [[w] if packed else [t.detach().clone().requires_grad_() for t in w] for w in (leaves.gate, leaves.up, leaves.down)]
    shared = (leaves.shared_gate, leaves.shared_up, leaves.shared_down, leaves.shared_output_gate)
    w = p.router_weights.clone().requires_grad_()
    torch.library.opcheck(OPS.layer.default, (leaves.x, w, engine.schedule(p.expert_ids), *weights, *shared, engine.handle, 0, packed, True, recompute, ""))


def test_opcheck_layer_backward(device):
    engine, p = engine_and_problem(device)
    mok._workspace.fill = 0
    schedule = engine.schedule(p.expert_ids)
    out, context = OPS.layer(p.x, p.router_weights, schedule, [p.gate], [p.up], [p.down], None, None, None, None, engine.handle, 0, True, True, False, "")
    for wanted, router in (([True, True, True], True), ([False, True, False], False)):
        torch.library.opcheck(OPS.layer_backward.default, (p.dout, p.x, p.router_weights, schedule, context, [p.gate], [p.up], [p.down], None, None, None, None,
                                                           engine.handle, 0, True, False, router, wanted, ""))


@pytest.mark.parametrize("name", ["schedule", "schedule_with_counts"])
def test_opcheck_schedule(name, device):
    engine, p = engine_and_problem(device)
    ids = p.expert_ids.to(torch.int32)
    # A schedule holds its number, so that two are never equal: only shapes are compared.
    torch.library.opcheck(getattr(OPS, name).default, (ids, engine.handle, 0), test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))
    if name == "schedule_with_counts":
        _, local, everywhere = OPS.schedule_with_counts(ids, engine.handle, 0)
        assert torch.equal(local, torch.bincount(ids.flatten().long(), minlength=8)) and torch.equal(local, everywhere)


def test_the_operator_and_the_short_way_give_the_same_bits(device):
    engine, p = engine_and_problem(device, shared=64)
    results = []
    for traced in (False, True):
        leaves = p.with_leaves(torch.bfloat16)
        w = p.router_weights.clone().requires_grad_()
        shared = (leaves.shared_gate, leaves.shared_up, leaves.shared_down)
        if traced:
            out = OPS.layer(leaves.x, w, engine.schedule(p.expert_ids), [leaves.gate], [leaves.up], [leaves.down], *shared, None, engine.handle, 0, True, True, False, "")[0]
        else:
            out = mok.moe(leaves.x, p.expert_ids, w, leaves.gate, leaves.up, leaves.down, *shared, engine=engine)
        out.backward(p.dout)
        results.append({"out": out.detach(), "w": w.grad, **{n: t.grad for n, t in leaves.tensors().items() if n != "router_weights"}})
    for name in results[0]:
        assert torch.equal(results[0][name], results[1][name]), name


# --- torch.compile ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_fullgraph_with_dynamic_tokens(backend, device):
    engine, p = engine_and_problem(device)

    def function(x, ids, w, gate, up, down):
        return mok.moe(x * 2, ids, w, gate, up, down, engine=engine) + 1

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (50, 3, 31):
        grads = []
        for f in (function, compiled):
            x, gate = p.x[:tokens].clone().requires_grad_(), p.gate.clone().requires_grad_()
            out = f(x, p.expert_ids[:tokens], p.router_weights[:tokens], gate, p.up, p.down)
            out.backward(p.dout[:tokens])
            grads.append((out.detach(), x.grad, gate.grad))
        for a, b in zip(*grads):
            assert torch.equal(a, b), tokens


def test_compile_a_module_compiles_once_for_all_token_counts(device):
    torch._dynamo.reset()
    layer = mok.MoE(128, 64, 8, 2, shared_intermediate=64, max_tokens=64, device=device)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for tokens in (40, 7, 64, 12):
        x = torch.randn(tokens, 128, device=device).bfloat16().requires_grad_()
        out = compiled(x)
        out.float().square().sum().backward()
        assert torch.allclose(out.float(), layer(x).float(), atol=2e-2, rtol=2e-2) and x.grad.isfinite().all()
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1


def test_compile_with_per_expert_weights_and_recompute(device):
    torch._dynamo.reset()
    layer = mok.MoE(128, 64, 4, 2, max_tokens=64, per_expert=True, recompute=True, device=device)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    x = torch.randn(20, 128, device=device).bfloat16()
    ids, w = torch.randint(4, (20, 2), device=device), torch.rand(20, 2, device=device)
    grads = []
    for f in (layer, compiled):
        layer.zero_grad()
        f(x, ids, w).backward(torch.ones_like(x))
        grads.append([p.grad.clone() for p in layer.expert_parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_compile_without_max_tokens_says_what_is_missing(device):
    torch._dynamo.reset()
    engine = mok.engine(group=mok.Group.local(device), hidden=128, intermediate=64, num_experts=8, topk=2)
    p = reference.make(device=device)
    compiled = torch.compile(lambda x: mok.moe(x, p.expert_ids, p.router_weights, p.gate, p.up, p.down, engine=engine), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="max_tokens is not known"):
        compiled(p.x)


def test_too_many_tokens_for_a_compiled_graph_is_an_error(device):
    torch._dynamo.reset()
    layer = mok.MoE(128, 64, 8, 2, max_tokens=32, device=device)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        compiled(torch.randn(32, 128, device=device).bfloat16())
        with pytest.raises(ValueError, match="33.*32"):
            compiled(torch.randn(33, 128, device=device).bfloat16())


# --- activation checkpointing -------------------------------------------------------------------------------------------
class Block(torch.nn.Module):
    def __init__(self, device, **options):
        super().__init__()
        self.norm = torch.nn.LayerNorm(128, dtype=torch.bfloat16, device=device)
        self.moe = mok.MoE(128, 64, 8, 2, shared_intermediate=64, max_tokens=64, device=device, **options)

    def forward(self, x):
        return x + self.moe(self.norm(x)) * 0.5


def run_block(block, x, how):
    block.zero_grad()
    x = x.clone().requires_grad_()
    out = how(block, x)
    out.float().square().sum().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in block.parameters())]


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "hooks"])
def test_A7_D4_checkpoint_routes_once(reentrant, device):
    """The second run of the region neither routes again nor lets ranks meet for it, and everything has the same bits."""
    block, x = Block(device), torch.randn(30, 128, device=device).bfloat16()
    plain = run_block(block, x, lambda b, v: b(v))
    before = block.moe.engine.stats()
    again = run_block(block, x, lambda b, v: checkpoint(b, v, use_reentrant=reentrant))
    after = block.moe.engine.stats()
    assert after["schedules"] - before["schedules"] == 1 and after["forwards"] - before["forwards"] == 2
    assert all(torch.equal(a, b) for a, b in zip(plain, again))


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "hooks"])
def test_D4_several_regions_and_layers_in_any_order(reentrant, device):
    """Two layers of one shape in one region, several regions alive at once, backwards in the order of the forwards."""
    blocks = torch.nn.Sequential(Block(device), Block(device))
    inputs = [torch.randn(20 + i, 128, device=device).bfloat16().requires_grad_() for i in range(3)]
    expected = [torch.autograd.grad(blocks(x).float().sum(), x)[0] for x in inputs]
    before = blocks[0].moe.engine.stats()["schedules"]
    outs = [checkpoint(blocks, x, use_reentrant=reentrant) for x in inputs]
    for x, out, want in zip(inputs, outs, expected):
        out.float().sum().backward()
        assert torch.equal(x.grad, want)
    assert blocks[0].moe.engine.stats()["schedules"] - before == 6


def test_D4_a_region_run_three_times_routes_once(device):
    block, x = Block(device), torch.randn(30, 128, device=device).bfloat16().requires_grad_()
    before = block.moe.engine.stats()["schedules"]
    out = checkpoint(block, x, use_reentrant=False)
    first = torch.autograd.grad(out.float().sum(), x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(out.float().sum(), x)[0])
    assert block.moe.engine.stats()["schedules"] - before == 1


def test_D4_recompute_option_keeps_no_context_and_routes_once(device):
    block, x = Block(device), torch.randn(30, 128, device=device).bfloat16()
    plain = run_block(block, x, lambda b, v: b(v))
    block.moe.recompute = True
    before = block.moe.engine.stats()
    again = run_block(block, x, lambda b, v: b(v))
    after = block.moe.engine.stats()
    assert [after[n] - before[n] for n in ("schedules", "forwards", "recomputes", "backwards")] == [1, 1, 1, 1]
    assert all(torch.equal(a, b) for a, b in zip(plain, again))


def test_inference_between_does_not_disturb_a_checkpoint(device):
    block, x = Block(device), torch.randn(30, 128, device=device).bfloat16()
    plain = run_block(block, x, lambda b, v: b(v))

    def with_inference(b, v):
        with torch.no_grad():
            b(v.flip(0))
        out = checkpoint(b, v, use_reentrant=True)
        with torch.no_grad():
            b(v.flip(0))
        return out

    assert all(torch.equal(a, b) for a, b in zip(plain, run_block(block, x, with_inference)))


def _checkpoint_on_ranks(group, reentrant):
    torch.manual_seed(5)
    block = Block(group.device, group=group)
    g = torch.Generator().manual_seed(group.rank)
    x = torch.randn(20 + group.rank, 128, generator=g).bfloat16().to(group.device)
    plain = run_block(block, x, lambda b, v: b(v))
    before = block.moe.engine.stats()["schedules"]
    again = run_block(block, x, lambda b, v: checkpoint(b, v, use_reentrant=reentrant))
    return all(torch.equal(a, b) for a, b in zip(plain, again)), block.moe.engine.stats()["schedules"] - before


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "hooks"])
def test_D4_checkpoint_on_ranks(reentrant, run_ranks):
    assert run_ranks(2, _checkpoint_on_ranks, reentrant) == [(True, 1)] * 2


def test_selective_checkpoint_sees_an_operator(device):
    """A policy can keep what mok::layer and mok::schedule return."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in (OPS.layer.default, OPS.schedule.default) else CheckpointPolicy.PREFER_RECOMPUTE

    block, x = Block(device), torch.randn(30, 128, device=device).bfloat16()
    plain = run_block(block, x, lambda b, v: b(v))
    before = block.moe.engine.stats()
    again = run_block(block, x, lambda b, v: checkpoint(b, v, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)))
    after = block.moe.engine.stats()
    assert after["schedules"] - before["schedules"] == 1 and after["forwards"] - before["forwards"] == 1
    assert all(torch.equal(a, b) for a, b in zip(plain, again))


def test_saved_tensors_may_be_moved_away_and_back(device):
    p = reference.make(device=device)
    plain = jobs.solve(mok.Group.local(device), p)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.cpu().clone(), lambda t: t.to(device).clone()):
        moved = jobs.solve(mok.Group.local(device), p)
    jobs.assert_same_bits(plain, moved)


# --- autocast -----------------------------------------------------------------------------------------------------------
def test_autocast_takes_float32_parameters(device):
    layer = mok.MoE(128, 64, 8, 2, shared_intermediate=64, dtype=torch.float32, max_tokens=64, device=device)
    x = torch.randn(20, 128, device=device, requires_grad=True)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert x.grad.dtype == torch.float32 and all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())
    with pytest.raises(TypeError, match="x is torch.float32: it must be torch.bfloat16 .*autocast"):
        layer(x)


def test_autocast_keeps_router_weights_in_float32(device):
    p = reference.make(device=device)
    w = p.router_weights + 2.0**-20
    plain = mok.moe(p.x, p.expert_ids, w, p.gate, p.up, p.down)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert torch.equal(plain, mok.moe(p.x.float(), p.expert_ids, w, p.gate.float(), p.up.float(), p.down.float()))
