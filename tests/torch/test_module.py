"""mok.MoE: parameters, state, routers, fused accumulation."""

import copy
import io

import pytest
import reference
import torch
import torch.nn.functional as F

import mok


def make(device, **options):
    torch.manual_seed(11)
    return mok.MoE(128, 64, 8, 2, **{"max_tokens": 64, "device": device, **options})


def batch(device, tokens=20):
    return torch.randn(tokens, 128, generator=torch.Generator().manual_seed(2)).bfloat16().to(device)


def test_state_dict_is_the_plain_layout(device):
    layer = make(device, shared_intermediate=192, shared_output_gate=True, router_bias=True)
    assert {name: tuple(t.shape) for name, t in layer.state_dict().items()} == {
        "gate": (8, 64, 128), "up": (8, 64, 128), "down": (8, 128, 64), "shared_gate": (192, 128), "shared_up": (192, 128), "shared_down": (128, 192),
        "shared_output_gate": (128,), "router.weight": (8, 128), "router_bias": (8,)}
    assert all(t.data_ptr() == getattr(layer, name).data_ptr() for name, t in layer.state_dict().items() if "." not in name)


def test_state_dict_goes_through_a_file(device):
    layer, other = make(device, shared_intermediate=64), make(device, shared_intermediate=64)
    other.reset_parameters()
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    x = batch(device)
    assert not torch.equal(layer(x), other(x))
    other.load_state_dict(torch.load(file))
    assert torch.equal(layer(x), other(x))


def test_combined_and_per_expert_layouts_hold_the_same_layer(device):
    layer, x = make(device, shared_intermediate=64), batch(device)
    combined = make(device, shared_intermediate=64, gate_up="combined")
    state = layer.state_dict()
    combined.load_state_dict({"gate": torch.cat([state["gate"], state["up"]], 1), "down": state["down"], "shared_gate": torch.cat([state["shared_gate"], state["shared_up"]]),
                              "shared_down": state["shared_down"], "router.weight": state["router.weight"]})
    separate = make(device, shared_intermediate=64, per_expert=True)
    separate.load_state_dict({**{k: v for k, v in state.items() if k not in ("gate", "up", "down")},
                              **{f"{name}.{e}": state[name][e] for name in ("gate", "up", "down") for e in range(8)}})
    assert torch.equal(layer(x), combined(x)) and torch.equal(layer(x), separate(x))


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_router(router, normalize, device):
    layer, x = make(device, router=router, normalize=normalize, scale=1.5), batch(device)
    out, routing = layer(x, return_routing=True)
    scores = F.linear(x.float(), layer.router.weight.float())
    scores = scores.softmax(-1) if router == "softmax" else scores.sigmoid()
    weights, ids = scores.topk(2)
    weights = (weights / weights.sum(-1, keepdim=True) if normalize else weights) * 1.5
    assert torch.equal(routing.expert_ids.long(), ids) and torch.allclose(routing.router_weights, weights)
    assert torch.equal(out, layer(x, ids, weights)) or torch.allclose(out.float(), layer(x, ids, weights).float(), atol=1e-2)
    out.sum().backward()
    assert layer.router.weight.grad.abs().sum() > 0


def test_router_bias_changes_the_choice_and_not_the_weights(device):
    layer, x = make(device, router="sigmoid", router_bias=True, normalize=False), batch(device)
    layer.router_bias[3] = 100.0
    _, routing = layer(x, return_routing=True)
    assert (routing.expert_ids == 3).any(1).all() and routing.router_weights.max() <= 1.0


def test_given_routes_need_no_router(device):
    layer, p = make(device, router=None), reference.make(device=device)
    assert layer.router is None
    assert torch.equal(layer(p.x, p.expert_ids, p.router_weights), mok.moe(p.x, p.expert_ids, p.router_weights, layer.gate, layer.up, layer.down))
    with pytest.raises(ValueError, match="no router"):
        layer(p.x)
    with pytest.raises(ValueError, match="without router_weights"):
        layer(p.x, p.expert_ids)


def test_a_schedule_serves_several_calls(device):
    layer, x = make(device), batch(device)
    out, routing = layer(x, return_routing=True)
    before = layer.engine.stats()["schedules"]
    assert torch.equal(out, layer(x, routing.expert_ids, routing.router_weights, schedule=routing.schedule))
    assert layer.engine.stats()["schedules"] == before


def test_no_tokens_at_all(device):
    layer = make(device, shared_intermediate=64)
    x = torch.empty(0, 128, dtype=torch.bfloat16, device=device, requires_grad=True)
    out = layer(x)
    out.sum().backward()
    assert out.shape == (0, 128) and all((p.grad == 0).all() for p in layer.parameters())


def test_training_lowers_the_loss(device):
    torch.manual_seed(0)
    layer = make(device, shared_intermediate=64, dtype=torch.float32)
    x, target = batch(device, 64), torch.randn(64, 128, device=device)
    optimizer, losses = torch.optim.AdamW(layer.parameters(), lr=3e-3), []
    for _ in range(30):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = (layer(x).float() - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_without_max_tokens_the_workspace_grows(device):
    layer, fixed = make(device, max_tokens=None), make(device, max_tokens=1000)
    for tokens in (10, 500, 130, 1000, 0):
        x = batch(device, tokens).requires_grad_()
        y = x.detach().requires_grad_()
        a, b = layer(x), fixed(y)
        a.sum().backward()
        b.sum().backward()
        assert torch.equal(a, b) and torch.equal(x.grad, y.grad)
    assert sorted(layer.engine._open) == [128, 256, 512, 1024]


def test_layers_of_one_shape_share_a_workspace(device):
    a, b = make(device), make(device)
    assert a.engine is b.engine and make(device, swiglu_limit=3.0).engine is not a.engine


def test_meta_device_then_real(device):
    layer = mok.MoE(128, 64, 8, 2, shared_intermediate=64, max_tokens=64, device="meta")
    assert layer.gate.is_meta
    layer.to_empty(device=device)
    layer.reset_parameters()
    assert layer(batch(device)).isfinite().all()


def test_deepcopy_is_another_layer(device):
    layer, x = make(device), batch(device)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.down.zero_()
    assert (other(x) == 0).all() and not (layer(x) == 0).all()


def test_a_layer_of_one_process_can_be_pickled(device, tmp_path):
    layer, x = make(device), batch(device)
    torch.save(layer, tmp_path / "layer.pt")
    other = torch.load(tmp_path / "layer.pt", weights_only=False)
    assert torch.equal(other(x), layer(x)) and torch.equal(copy.copy(layer)(x), layer(x))
    assert other.gate.data_ptr() != layer.gate.data_ptr()


def test_autocast_to_float16_is_refused(device):
    layer, x = make(device), batch(device)
    with torch.autocast(device.type, torch.float16), pytest.raises(TypeError, match="autocast is to torch.float16, but MoK computes in bfloat16"):
        layer(x)
    assert layer(x).isfinite().all()


def test_wrong_inputs_are_named(device):
    layer, x = make(device, shared_intermediate=64), batch(device)

    def ids(*shape):
        return torch.zeros(*shape, dtype=torch.int64, device=device)

    with pytest.raises(ValueError, match="last size must be 128"):
        mok.moe(x[:, :64], ids(20, 2), torch.ones(20, 2, device=device), layer.gate, layer.up, layer.down, engine=layer.engine)
    with pytest.raises(TypeError, match="expert_ids is torch.float32"):
        layer(x, torch.zeros(20, 2, device=device), torch.ones(20, 2, device=device))
    with pytest.raises(ValueError, match=r"expert_ids is \[20, 3\]"):
        layer(x, ids(20, 3), torch.ones(20, 2, device=device))
    with pytest.raises(ValueError, match=r"router_weights is \[19, 2\]: x has 20 tokens"):
        layer(x, ids(20, 2), torch.ones(19, 2, device=device))
    with pytest.raises(ValueError, match=r"expert_ids is \[19, 2\]: x has 20 tokens"):
        layer(x, ids(19, 2), torch.ones(20, 2, device=device))
    with pytest.raises(ValueError, match="down is"):
        mok.moe(x, ids(20, 2), torch.ones(20, 2, device=device), layer.gate, layer.up, layer.up)
    with pytest.raises(TypeError, match="gate is torch.float32"):
        mok.moe(x, ids(20, 2), torch.ones(20, 2, device=device), layer.gate.float(), layer.up, layer.down)
    with pytest.raises(ValueError, match="shared_gate is missing"):
        mok.moe(x, ids(20, 2), torch.ones(20, 2, device=device), layer.gate, layer.up, layer.down, engine=layer.engine)


# --- main_grad ----------------------------------------------------------------------------------------------------------
def accumulate(layer, batches, dtype, device):
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros(parameter.shape, dtype=dtype, device=device)
    for x in batches:
        layer(x).float().square().sum().backward()
    return {name: p for name, p in layer.named_parameters()}


@pytest.mark.parametrize("per_expert", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_main_grad_accumulates_in_float32(per_expert, recompute, device):
    """Sums over microbatches as a float32 sum of unrounded gradients would be: closer than adding bf16 gradients."""
    layer = make(device, shared_intermediate=64, shared_output_gate=True, main_grad=True, per_expert=per_expert, recompute=recompute)
    batches = [batch(device, 20 + i) for i in range(4)]
    fused = {n: p.main_grad.clone() for n, p in accumulate(layer, batches, torch.float32, device).items() if n != "router.weight"}
    assert all(p.grad is None for n, p in layer.named_parameters() if n != "router.weight")
    layer.main_grad, layer._sink = False, None
    for p in layer.parameters():
        p.grad = None
    for x in batches:
        layer(x).float().square().sum().backward()
    for name, parameter in layer.named_parameters():
        if name != "router.weight":
            assert torch.allclose(fused[name], parameter.grad.float(), rtol=3e-2, atol=3e-2 * parameter.grad.float().abs().max().item()), name


def test_main_grad_in_bfloat16_first_step_equals_grad(device):
    layer, x = make(device, shared_intermediate=64, main_grad=True), batch(device)
    fused = {n: p.main_grad.clone() for n, p in accumulate(layer, [x], torch.bfloat16, device).items()}
    layer.main_grad = False
    layer(x).float().square().sum().backward()
    for name, parameter in layer.named_parameters():
        if name != "router.weight":
            assert torch.equal(fused[name], parameter.grad), name


def test_main_grad_tells_a_framework_that_asks(device):
    """Parameters with grad_added_to_main_grad get it set, and a gradient without meaning so that hooks run."""
    layer, x = make(device, main_grad=True), batch(device)
    seen = []
    for name, p in layer.named_parameters():
        if name != "router.weight":
            p.main_grad, p.grad_added_to_main_grad = torch.zeros(p.shape, device=device), False
            p.register_post_accumulate_grad_hook(lambda p: seen.append(p.shape))
    layer(x).sum().backward()
    assert len(seen) == 3 and all(p.grad_added_to_main_grad for p in layer.expert_parameters()) and layer.gate.main_grad.abs().sum() > 0


def test_main_grad_when_two_forwards_come_before_two_backwards(device):
    layer = make(device, main_grad=True)
    batches = [batch(device, 20), batch(device, 31)]
    fused = {n: p.main_grad.clone() for n, p in accumulate(layer, batches, torch.float32, device).items() if n != "router.weight"}
    for p in layer.parameters():
        p.main_grad.zero_()
    outs = [layer(x) for x in batches]
    for out in outs:
        out.float().square().sum().backward()
    assert all(torch.equal(fused[n], p.main_grad) for n, p in layer.named_parameters() if n in fused)


def test_main_grad_for_some_experts_only_is_refused(device):
    layer = make(device, main_grad=True, per_expert=True)
    layer.gate[2].main_grad = torch.zeros(64, 128, device=device)
    with pytest.raises(ValueError, match="some experts of gate"):
        layer(batch(device))


@pytest.mark.parametrize("bad, says", [(torch.zeros(8, 64, 64), "main_grad of gate is"), (torch.zeros(8, 64, 128, dtype=torch.float16), "float16"),
                                       (torch.zeros(8, 128, 64).transpose(1, 2), "not contiguous")], ids=["shape", "dtype", "strides"])
def test_main_grad_that_does_not_fit_is_refused(bad, says, device):
    layer = make(device, main_grad=True)
    layer.gate.main_grad = bad.to(device)
    with pytest.raises((ValueError, TypeError), match=says):
        layer(batch(device))


def test_main_grad_under_compile(device):
    torch._dynamo.reset()
    layer, x = make(device, main_grad=True), batch(device)
    eager = {n: p.main_grad.clone() for n, p in accumulate(layer, [x, x], torch.float32, device).items() if n != "router.weight"}
    for p in layer.parameters():
        p.main_grad.zero_()
    layer.prepare()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for _ in range(2):
        compiled(x).float().square().sum().backward()
    for n, p in layer.named_parameters():
        if n in eager:
            assert torch.allclose(eager[n], p.main_grad, rtol=1e-2, atol=1e-2 * eager[n].abs().max().item()), n
