"""MXFP8: the library's quantisation against PyTorch's own e4m3, the layer over ranks, the published tuples, and the weight cache."""

import jobs
import pytest
import reference
import torch

import mok
import mok.functional as MF
import mok.ops
from mok import _mx

EVERY_BF16 = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8).cpu()


def tokens(count, device):
    return torch.randn(count, 128).bfloat16().to(device)


def untile(scales, rows, blocks):
    """The published place of every scale, from its words."""
    tiles_across = -(-blocks // 4)
    flat, r, b = scales.reshape(-1), torch.arange(rows)[:, None], torch.arange(blocks)[None]
    return flat[(r // 128 * tiles_across + b // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + b % 4]


# --- quantisation -------------------------------------------------------------------------------------------------------
def in_torch(x):
    """[M, N] -> data, scale bytes [M, N / 32] with PyTorch's conversion to float8_e4m3fn."""
    blocks = x.double().view(x.shape[0], -1, 32)
    largest = torch.where(blocks.isfinite(), blocks.abs(), 0).amax(-1)
    exponent = torch.stack([torch.ldexp(torch.tensor(448.0, dtype=torch.float64), torch.tensor(e)) >= largest for e in range(-39, 119)]).flip(0).long().cumprod(0).sum(0)
    exponent = 119 - exponent  # the smallest one whose 448 * 2^e holds the largest element
    scaled = torch.where(blocks.isfinite(), (blocks * 2.0 ** -exponent[..., None].double()).clamp(-448, 448), float("nan"))
    return scaled.view(x.shape).float().to(torch.float8_e4m3fn), (exponent + 127).to(torch.uint8)


def test_every_bf16_with_neighbours_of_every_size(device):
    shuffled = EVERY_BF16[torch.randperm(2**16)]
    for x in (EVERY_BF16.view(-1, 64), shuffled.view(-1, 64), shuffled.view(-1, 1).expand(-1, 32).contiguous()):
        q, (data, scales) = _mx.quantise(x.to(device)), in_torch(x)
        assert torch.equal(bits(q.data) & 0x7F, bits(data) & 0x7F)  # the sign of a NaN is no fact
        finite = x.isfinite()
        assert torch.equal(bits(q.data)[finite], bits(data)[finite])
        assert torch.equal(untile(q.scales.cpu(), *scales.shape), scales)


@pytest.mark.parametrize("size", [(128, 256), (3, 64, 192), (2, 192, 64), (32, 32), (1, 0, 64)], ids=str)
def test_shapes_and_both_quantisations(size, device):
    x = (torch.randn(size) * torch.logspace(-30, 30, size[-1])).bfloat16()
    data, scales, t_data, t_scales = mok.ops.mxfp8_quantize(x.to(device), True, True)
    count, rows, cols = (size[0] if len(size) == 3 else 1), size[-2], size[-1]
    assert data.shape == x.shape and t_data.shape == x.transpose(-1, -2).shape
    assert scales.shape == _mx.scales_shape(count, rows, cols) and t_scales.shape == _mx.scales_shape(count, cols, rows)
    if rows:
        want = mok.ops._quantize_in_torch(x, True, True)
        for a, b in zip((data, scales, t_data, t_scales), want):
            assert torch.equal(bits(a), bits(b))
    assert mok.ops.mxfp8_quantize(x)[2] is None and mok.ops.mxfp8_quantize(x, False, True)[0] is None


# --- the layer ----------------------------------------------------------------------------------------------------------
OPTIONS = [dict(), dict(shared=64, output_gate=True, dropped=0.2), dict(gate_up="combined", limit=4.0), dict(gate_up="interleaved", width=192)]  # a limit that is often hit makes the derivative jump


def published_tolerance(got, p):
    oracle = reference.solve(p, torch.float64)
    for name, want in oracle.items():
        want = want.cpu()
        difference = (got[name].double() - want).abs()
        assert difference.sum() <= 0.1 * want.abs().sum(), f"{name}: off by {difference.sum() / want.abs().sum():.3g} of its size"
        assert difference.max() <= 1.0, f"{name}: off by {difference.max():.3g}"


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_N10_errors_against_the_unquantised_layer(options, device):
    p = reference.make(tokens=120, hidden=256, **options)
    p.dout = p.dout / 16
    got = jobs.solve(mok.Group.local(device), p, dtype="mxfp8")
    published_tolerance(got, p)
    bf16 = jobs.solve(mok.Group.local(device), p)
    assert not torch.equal(got["out"], bf16["out"]) and not torch.equal(got["gate"], bf16["gate"])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_N5_same_bits_on_any_number_of_ranks_saved_or_recomputed(options, device, run_ranks):
    p = reference.make(tokens=90, experts=10, **options)
    alone = jobs.solve(mok.Group.local(device), p, dtype="mxfp8")
    for ranks, extra in ((2, dict(save="none")), (4, dict(recompute=True))):
        jobs.assert_same_bits(alone, jobs.together(run_ranks(ranks, _solve, p, extra)))


def _solve(group, p, extra):
    return jobs.solve(group, p, dtype="mxfp8", **extra)


@pytest.mark.parametrize("counts", [[44, 1, 31, 33], [0, 5, 0, 59], [1, 0, 0, 0]], ids=str)
def test_S5_any_number_of_tokens_of_an_expert(counts, device):
    ids = torch.cat([torch.full((n, 1), e) for e, n in enumerate(counts)])
    p = reference.make(tokens=len(ids), hidden=128, width=128, experts=4, topk=1, ids=ids[torch.randperm(len(ids))])
    p.dout = p.dout / 16
    got = jobs.solve(mok.Group.local(device), p, dtype="mxfp8")
    published_tolerance(got, p)
    for e, n in enumerate(counts):
        assert n or not got["gate"][e].any() and not got["down"][e].any()


def test_N1_twice_the_same_with_poisoned_memory(device):
    p = reference.make(tokens=70, dropped=0.5)
    first, second = (jobs.solve(mok.Group.local(device), p, dtype="mxfp8", save="none") for _ in range(2))
    for name in first:
        assert torch.equal(first[name], second[name]) and first[name].isfinite().all(), name


def test_weight_gradients_in_bf16(device):
    p = reference.make(tokens=200, hidden=256, experts=4)
    oracle, size = reference.solve(p, torch.float64), dict(hidden=256, intermediate=64, num_experts=4, topk=2, max_tokens=200, dtype="mxfp8")
    quantised, plain = (jobs.solve(mok.Group.local(device), p, engine=mok.engine(device=device, mx_wgrad_bf16=flag, **size)) for flag in (False, True))
    assert torch.equal(quantised["x"], plain["x"]) and torch.equal(quantised["out"], plain["out"])
    for name in ("gate", "up", "down"):
        assert reference.error(plain[name], oracle[name]) < 0.97 * reference.error(quantised[name], oracle[name])


# --- the weight cache ---------------------------------------------------------------------------------------------------
def count_made(run):
    before = _mx.made
    run()
    return _mx.made - before


def one_pass(layer, x):
    layer(x).float().square().sum().backward()


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_are_quantised_once_for_all_microbatches_until_the_optimizer_steps(recompute, device):
    layer = mok.MoE(128, 64, 8, 2, dtype="mxfp8", recompute=recompute, device=device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = tokens(40, device)
    assert count_made(lambda: layer(x).sum()) == 3  # gate, up, down for the forward
    assert count_made(lambda: one_pass(layer, x)) == 3  # and for the backward
    assert count_made(lambda: [one_pass(layer, x) for _ in range(3)]) == 0
    optimizer.step()
    assert count_made(lambda: [one_pass(layer, x) for _ in range(2)]) == 6
    out = layer(x)
    mok.weights_changed()
    assert torch.equal(out, layer(x))


def test_writes_to_a_weight_are_noticed(device):
    layer = mok.MoE(128, 64, 4, 2, dtype="mxfp8", router=None, device=device)
    x, ids, w = tokens(9, device), torch.zeros(9, 2, dtype=torch.int32, device=device), torch.full((9, 2), 0.5, device=device)
    first = layer(x, ids, w)
    with torch.no_grad():
        layer.down.mul_(2)
    assert torch.equal(layer(x, ids, w), 2 * first)
    layer.down.data.mul_(2)  # the version counter does not see this
    mok.weights_changed(layer.down)
    assert torch.equal(layer(x, ids, w), 4 * first)
    layer.down.data = layer.down.data / 4  # other memory
    assert torch.equal(layer(x, ids, w), first)
    state = {name: 2 * t for name, t in layer.state_dict().items()}
    layer.load_state_dict(state)
    assert not torch.equal(layer(x, ids, w), first)


def test_optimizers_that_write_through_data_are_noticed(device):
    layer = mok.MoE(128, 64, 4, 2, dtype="mxfp8", device=device)
    master = [torch.nn.Parameter(p.detach().float()) for p in layer.parameters()]
    optimizer, x = torch.optim.SGD(master, lr=1.0), tokens(9, device)
    layer(x)
    for m in master:
        m.grad = torch.ones_like(m)
    optimizer.step()
    for m, p in zip(master, layer.parameters()):
        p.data.copy_(m.data)
    out = layer(x)
    mok.weights_changed()
    assert torch.equal(out, layer(x))


def test_freed_weights_leave_the_cache(device):
    mok.weights_changed()
    layer = mok.MoE(128, 64, 4, 2, dtype="mxfp8", device=device)
    layer(tokens(9, device))
    assert _mx.kept_bytes() >= 3 * 4 * 64 * 128
    del layer
    import gc

    gc.collect()
    assert _mx.kept_bytes() == 0 and not _mx._kept and not _mx._wide


def test_weights_kept_widened_change_no_bit(device):
    p = reference.make(tokens=60, hidden=256, experts=4, shared=64)
    size = dict(hidden=256, intermediate=64, num_experts=4, topk=2, max_tokens=60, shared_intermediate=64, dtype="mxfp8")
    kept, anew = (jobs.solve(mok.Group.local(device), p, engine=mok.engine(device=device, mx_keep_wide=flag, **size)) for flag in (True, False))
    jobs.assert_same_bits(kept, anew)


class Widener:
    """A workspace as the cache of widened weights sees it: what it makes is numbered."""

    device = torch.device("cpu")

    def __init__(self):
        self.made = []

    def wide_layout(self):
        return 4, 128, 64, "separate"

    def widen(self, weights, dgrad):
        self.made.append(("dgrad" if dgrad else "forward", weights.down is not None))
        return torch.full((8,), len(self.made))


def test_widened_weights_are_kept_until_they_change():
    mok.weights_changed()
    w, tensors = Widener(), [torch.randn(4, 64, 128).bfloat16(), torch.randn(4, 64, 128).bfloat16(), torch.randn(4, 128, 64).bfloat16()]
    whole, half = mok.LayerWeights(*tensors), mok.LayerWeights(*tensors[:2])

    def ask(weights, dgrad=False):
        return int(_mx.wide(w, weights, dgrad)[0])

    assert ask(half) == 1 and ask(half) == 1  # a recompute has no use for down
    assert ask(whole) == 2 and ask(whole) == 2 and ask(half) == 2
    assert ask(whole, True) == 3 and ask(whole, True) == 3 and w.made == [("forward", False), ("forward", True), ("dgrad", True)]
    tensors[2].mul_(2)
    assert ask(half) == 2  # down is not read
    assert ask(whole) == 4 and ask(whole, True) == 5
    mok.weights_changed(tensors[0])
    assert ask(whole) == 6 and ask(whole) == 6
    version, elsewhere = tensors[2]._version, tensors[2].clone()
    tensors[2].data = elsewhere  # other memory, as some frameworks do
    assert tensors[2]._version == version and ask(whole) == 7
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    torch.optim.SGD([parameter], lr=1.0).step()
    assert ask(whole) == 8
    with torch.inference_mode():
        frozen = mok.LayerWeights(*(t.clone() for t in tensors))
        assert ask(frozen) == 9 and ask(frozen) == 10  # no version counter
    q = [_mx.quantise(t, True, False) for t in tensors]
    tuples = mok.LayerWeights(*q)
    assert ask(tuples) == 11 and ask(tuples) == 11
    q[1].scales.fill_(90)
    assert ask(tuples) == 12
    before = _mx.kept_bytes()
    del tuples, q
    assert _mx.kept_bytes() == before - 64
    mok.weights_changed()
    assert _mx.kept_bytes() == 0


def test_other_streams_wait_for_what_is_kept(monkeypatch):
    class Stream:
        device = torch.device("cuda", 0)

        def __init__(self):
            self.waited = []

        def record_event(self):
            return "event"

        def wait_event(self, event):
            self.waited.append(event)

    class Memory:
        is_cuda, device = True, Stream.device

        def __init__(self):
            self.used_by = []

        def record_stream(self, stream):
            self.used_by.append(stream)

    a, b, memory = Stream(), Stream(), Memory()
    now = [a]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: now[0])
    made = _mx._Made(memory)
    made.use()
    assert not a.waited and not memory.used_by
    now[0] = b
    made.use()
    assert b.waited == ["event"] and memory.used_by == [b] and not a.waited


@pytest.mark.parametrize("options", [dict(per_expert=True), dict(gate_up="interleaved"), dict(gate_up="combined"), dict(main_grad=True)], ids=str)
def test_layouts_of_a_module_have_the_bits_of_the_plain_one(options, device):
    torch.manual_seed(3)
    x, results = tokens(50, device), []
    for extra in (dict(gate_up=options.get("gate_up", "separate")), options):
        torch.manual_seed(4)
        layer = mok.MoE(128, 64, 6, 2, dtype="mxfp8" if extra is options else "mxfp8", device=device, **extra)
        for p in layer.parameters():
            if options.get("main_grad") and extra is options:
                p.main_grad = torch.zeros_like(p, dtype=torch.float32)
        leaf = x.clone().requires_grad_()
        out = layer(leaf)
        out.float().square().sum().backward()
        results.append((out, leaf.grad))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_compiled_layers_use_the_cache(device):
    layer = mok.MoE(128, 64, 4, 2, dtype="mxfp8", max_tokens=16, router=None, device=device)
    x, ids, w = tokens(9, device), torch.ones(9, 2, dtype=torch.int32, device=device), torch.full((9, 2), 0.5, device=device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    mok.weights_changed()
    out = compiled(x, ids, w)
    assert count_made(lambda: compiled(x, ids, w)) == 0 and torch.equal(out, layer(x, ids, w))


# --- the published calls ------------------------------------------------------------------------------------------------
def tuples(p, backward):
    result = []
    for name in ("gate", "up", "down"):
        weight = getattr(p, name)
        if weight is None:
            result.append(None)
            continue
        normal, both = mok.ops.mxfp8_quantize(weight, True, False)[:2], mok.ops.mxfp8_quantize(weight, True, True)
        result.append(normal if not backward else both[2:] if name == "down" else both)
    return result


@pytest.mark.parametrize("options", [dict(shared=64), dict(gate_up="combined", shared=64), dict(dropped=0.3, width=128)], ids=str)
def test_tuples_mean_mxfp8_and_have_mok_moe_s_bits(options, device):
    p = reference.make(tokens=50, **options, device=device)
    plain = jobs.solve(mok.Group.local(device), p, dtype="mxfp8")
    config = MF.MoKConfig()
    w = MF.create_workspace(config, None, device=device, num_local_tokens=50, hidden_size=128, topk=2)
    schedule = MF.build_schedule(w, config, p.expert_ids, num_local_experts=8)
    shared = (p.shared_gate, p.shared_up, p.shared_down)
    out, context = MF.forward(config, w, schedule, p.x, p.router_weights, *shared, *tuples(p, False))
    assert torch.equal(out.cpu(), plain["out"])
    again = MF.recompute_forward_context(config, w, schedule, p.x, *shared[:2], *tuples(p, False)[:2])
    for kept in (context, again):
        grads = MF.backward(config, w, schedule, kept, p.dout, p.x, p.router_weights, *shared, *tuples(p, True))
        for name, grad in zip(("x", "router_weights", "gate", "up", "down", "shared_gate", "shared_up", "shared_down"), grads):
            assert grad is None or torch.equal(grad.cpu(), plain[name]), name
    data, scales = context.gate_routed
    width = p.down.shape[-1]
    assert data.dtype == torch.float8_e4m3fn and data.shape[1] == width and scales.shape == (data.shape[0] // 128, -(-width // 128), 32, 16)
    rows, blocks = int((p.expert_ids == p.expert_ids[p.expert_ids >= 0].min()).sum()), width // 32  # the first expert's rows come first
    wide = data.float()[:rows] * torch.exp2(untile(scales, data.shape[0], blocks)[:rows].float() - 127).repeat_interleave(32, 1)
    assert wide.isfinite().all() and 0.3 < wide.std() < 3  # gates of normal x and weights
    sinks = [None if t is None else torch.zeros_like(t, dtype=torch.float32) for t in (p.shared_gate, p.gate, p.shared_up, p.up, p.shared_down, p.down)]
    MF.backward(config, w, schedule, context, p.dout, p.x, p.router_weights, *shared, *tuples(p, True), main_grads=sinks)
    assert torch.equal(sinks[1].bfloat16().cpu(), plain["gate"]) and torch.equal(sinks[5].bfloat16().cpu(), plain["down"])


def test_tuples_that_do_not_fit_are_refused(device):
    p = reference.make(tokens=20, device=device)
    config = MF.MoKConfig()
    w = MF.create_workspace(config, None, device=device, num_local_tokens=20, hidden_size=128, topk=2)
    schedule = MF.build_schedule(w, config, p.expert_ids, num_local_experts=8)
    gate, up, down = tuples(p, False)

    def forward(gate=gate, up=up, down=down, shared=None):
        return MF.forward(config, w, schedule, p.x, p.router_weights, shared, shared, shared, gate, up, down)

    _, context = forward()
    for arguments, kind, says in ((dict(gate=p.gate), TypeError, "different precisions"), (dict(gate=gate[:1]), ValueError, "it must be .data, scale."),
                                  (dict(up=(p.up, up[1])), ValueError, "float8_e4m3fn"), (dict(up=(up[0], up[1][:1])), ValueError, "scale is"),
                                  (dict(down=gate), ValueError, "data is"), (dict(down=(1, 2)), TypeError, "tuple of tensors"),
                                  (dict(shared=gate), ValueError, "only routed weights")):
        with pytest.raises(kind, match=says):
            forward(**arguments)
    with pytest.raises(ValueError, match="transposed data, transposed scale"):
        MF.backward(config, w, schedule, context, p.dout, p.x, p.router_weights, None, None, None, gate, up, down)
    with pytest.raises(ValueError, match="dtype is bf16, it was mxfp8"):
        MF.backward(config, w, schedule, context, p.dout, p.x, p.router_weights, None, None, None, p.gate, p.up, p.down)
