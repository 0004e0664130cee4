"""mok.functional and mok.ops: what was written for the published MoK."""

import jobs
import pytest
import ranks
import reference
import torch

import mok
import mok.functional as MF
import mok.ops
from mok._row_table import read_table, row_table


def workspace(device, tokens=50, hidden=128, topk=2, config=None, group=None):
    config = config or MF.MoKConfig()
    return config, MF.create_workspace(config, group, device=device, num_local_tokens=tokens, hidden_size=hidden, topk=topk)


def weights_of(p):
    return (p.shared_gate, p.shared_up, p.shared_down, p.gate, p.up, p.down)


def test_forward_and_backward_are_mok_moe_s(device):
    p = reference.make(shared=64, device=device)
    plain = jobs.solve(mok.Group.local(device), p)
    config, w = workspace(device)
    schedule = MF.build_schedule(w, config, p.expert_ids, num_local_experts=8)
    out, context = MF.forward(config, w, schedule, p.x, p.router_weights, *weights_of(p))
    grads = MF.backward(config, w, schedule, context, p.dout, p.x, p.router_weights, *weights_of(p))
    names = ("x", "router_weights", "gate", "up", "down", "shared_gate", "shared_up", "shared_down")
    assert torch.equal(out.cpu(), plain["out"]) and len(grads) == len(names)
    for name, grad in zip(names, grads):
        assert torch.equal(grad.cpu(), plain[name]), name
    again = MF.recompute_forward_context(config, w, schedule, p.x, p.shared_gate, p.shared_up, p.gate, p.up)
    for a, b in zip(grads, MF.backward(config, w, schedule, again, p.dout, p.x, p.router_weights, *weights_of(p))):
        assert torch.equal(a, b)
    assert torch.equal(again.gate_routed[: context.gate_routed.shape[0]].isnan(), context.gate_routed.isnan()) and context.gate_shared.shape[1] == 64


@pytest.mark.parametrize("tokens", [1, 100, 513])
@pytest.mark.parametrize("options", [dict(shared=0), dict(shared=192), dict(shared=64, output_gate=True), dict(gate_up="combined", shared=64), dict(dropped=0.2, shared=64)],
                         ids=str)
def test_without_the_published_limits(tokens, options, device):
    p = reference.make(tokens=tokens, hidden=192, experts=5, **options, device=device)
    config, w = workspace(device, tokens, 192)
    schedule = MF.build_schedule(w, config, p.expert_ids, num_local_experts=5)
    gate = dict(w_shared_output_gate=p.shared_output_gate)
    out, context = MF.forward(config, w, schedule, p.x, p.router_weights, *weights_of(p), **gate)
    grads = MF.backward(config, w, schedule, context, p.dout, p.x, p.router_weights, *weights_of(p), **gate)
    names = ("x", "router_weights", "gate", "up", "down", "shared_gate", "shared_up", "shared_down", "shared_output_gate")
    results = {"out": out, **{n: g for n, g in zip(names, grads) if g is not None}}
    if tokens == 1:  # one number's error times x: chance, not a measure
        results.pop("shared_output_gate", None)
    reference.assert_as_good(results, p)
    assert (len(grads) == 9) == (p.shared_output_gate is not None)


def test_swiglu_limit(device):
    p = reference.make(tokens=80, limit=1.0, shared=64, device=device)
    config, w = workspace(device, 80)
    schedule = MF.build_schedule(w, config, p.expert_ids, num_local_experts=8)
    out, _ = MF.forward(config, w, schedule, p.x, p.router_weights, *weights_of(p), swiglu_limit=1.0)
    reference.assert_as_good({"out": out}, p)
    nothing, _ = MF.forward(config, w, schedule, p.x, p.router_weights, *weights_of(p), swiglu_limit=0)
    assert nothing.abs().max() < 1e-30


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grads_are_added_to(dtype, device):
    p = reference.make(shared=64, device=device)
    config, w = workspace(device)
    schedule = MF.build_schedule(w, config, p.expert_ids, num_local_experts=8)
    out, context = MF.forward(config, w, schedule, p.x, p.router_weights, *weights_of(p))
    fresh = MF.backward(config, w, schedule, context, p.dout, p.x, p.router_weights, *weights_of(p))
    order = (p.shared_gate, p.gate, p.shared_up, p.up, p.shared_down, p.down)
    sinks = [torch.zeros_like(t, dtype=dtype) for t in order]
    for _ in range(2):
        result = MF.backward(config, w, schedule, context, p.dout, p.x, p.router_weights, *weights_of(p), main_grads=sinks)
    assert result[2:] == (None,) * 6 and torch.equal(result[0], fresh[0])
    for sink, grad in zip(sinks, (fresh[5], fresh[2], fresh[6], fresh[3], fresh[7], fresh[4])):
        assert torch.allclose(sink.float(), 2 * grad.float(), rtol=2e-2, atol=1e-2 * grad.float().abs().max().item())


def test_main_grads_are_four_where_gate_and_up_are_one_matrix(device):
    p = reference.make(shared=64, gate_up="combined", device=device)
    config, w = workspace(device)
    schedule = MF.build_schedule(w, config, p.expert_ids, num_local_experts=8)
    out, context = MF.forward(config, w, schedule, p.x, p.router_weights, *weights_of(p))
    arguments = (config, w, schedule, context, p.dout, p.x, p.router_weights, *weights_of(p))
    shared_gate, gate, shared_down, down = (torch.zeros_like(t, dtype=torch.float32) for t in (p.shared_gate, p.gate, p.shared_down, p.down))
    assert MF.backward(*arguments, main_grads=(shared_gate, gate, shared_down, down))[2:] == (None,) * 6
    sixth = [torch.zeros_like(t) if t is not None else None for t in (shared_gate, gate, None, None, shared_down, down)]
    MF.backward(*arguments, main_grads=sixth)
    for four, six in zip((shared_gate, gate, shared_down, down), (t for t in sixth if t is not None)):
        assert torch.equal(four, six) and four.abs().max() > 0
    with pytest.raises(ValueError, match="main_grads has 5 entries: it must have 6, or 4 without the up matrices"):
        MF.backward(*arguments, main_grads=sixth[:5])


def test_per_expert_weights_as_lists(device):
    p = reference.make(shared=64, device=device)
    config, w = workspace(device)
    schedule = MF.build_schedule(w, config, p.expert_ids, num_local_experts=8)
    lists = [list(t.clone().unbind(0)) for t in (p.gate, p.up, p.down)]
    packed, _ = MF.forward(config, w, schedule, p.x, p.router_weights, *weights_of(p))
    separate, context = MF.forward(config, w, schedule, p.x, p.router_weights, p.shared_gate, p.shared_up, p.shared_down, *lists)
    assert torch.equal(packed, separate)
    grads = MF.backward(config, w, schedule, context, p.dout, p.x, p.router_weights, p.shared_gate, p.shared_up, p.shared_down, *lists)
    assert isinstance(grads[2], list) and len(grads[2]) == 8


def test_schedule_s_fields_follow_the_documented_order(device):
    p = reference.make(tokens=70, dropped=0.2, device=device)
    config, w = workspace(device, 70)
    schedule = MF.build_schedule(w, config, p.expert_ids, num_local_experts=8)
    rule = row_table([p.expert_ids], 8, 0)
    rows = int(schedule.num_tokens)
    assert torch.equal(schedule.peer_rank, rule.rank) and torch.equal(schedule.tokens_per_expert, rule.rows_per_expert) and rows == len(rule.rank) == int(rule.num_rows)
    real = rule.rank >= 0
    assert torch.equal(schedule.peer_token_idx[real], rule.slot[real]) and int(real.sum()) == int((p.expert_ids >= 0).sum())


def _table(group, p, tokens_of_rank):
    engine = mok.engine(group=group, hidden=128, intermediate=64, num_experts=10, topk=3, max_tokens=100)
    first = sum(tokens_of_rank[: group.rank])
    mine = p.expert_ids[first : first + tokens_of_rank[group.rank]].contiguous().to(group.device)
    return [t.cpu() for t in read_table(engine, engine.schedule(mine))]


def test_row_table_on_ranks(run_ranks):
    tokens = [30, 0, 100, 17]
    p = reference.make(tokens=sum(tokens), experts=10, topk=3, dropped=0.1)
    cut = torch.split(p.expert_ids, tokens)
    for rank, got in enumerate(run_ranks(4, _table, p, tokens)):
        want = row_table(list(cut), 10, rank)
        assert torch.equal(got[0], want.rank) and torch.equal(got[3], want.rows_per_expert)
        assert torch.equal(got[1][got[0] >= 0], want.slot[want.rank >= 0])


def _wrong_on_one_rank(group, p):
    """One rank's mistake in each pass: what every rank is told, and gradients of the passes after."""
    import torch.distributed as dist

    config, rank, size = MF.MoKConfig(minibatch_size=256, macrobatch_size=1024), dist.get_rank(group), dist.get_world_size(group)
    w = MF.create_workspace(config, group, device=torch.device("cpu"), num_local_tokens=len(p.x), hidden_size=p.x.shape[1], topk=2)
    first, count = mok.expert_range(8, size, rank)
    weights = [t if t is None else t[first : first + count].contiguous() if t.dim() == 3 else t for t in weights_of(p)]
    schedule = MF.build_schedule(w, config, p.expert_ids, num_local_experts=count)
    out, context = MF.forward(config, w, schedule, p.x, p.router_weights, *weights)
    bad, told = p.x.float() if rank == 1 else p.x, []
    for call in (lambda x: MF.forward(config, w, schedule, x, p.router_weights, *weights),
                 lambda x: MF.recompute_forward_context(config, w, schedule, x, *weights[:2], *weights[3:5]),
                 lambda x: MF.backward(config, w, schedule, context, p.dout, x, p.router_weights, *weights)):
        try:
            call(bad)
            told.append("nothing")
        except (ValueError, RuntimeError) as error:
            told.append(str(error))
    again, _ = MF.forward(config, w, schedule, p.x, p.router_weights, *weights)
    return told, torch.equal(out, again)


def test_one_rank_s_mistake_in_any_pass_is_told_to_all(device):
    if device.type != "cpu":
        pytest.skip("ranks of the published interface are processes")
    results = ranks.processes(2, _wrong_on_one_rank, reference.make(tokens=40), wants="process_group")
    for told, same in results:
        assert same and all("x is torch.float32" in sentence for sentence in told), told
    assert [sentence.split(" call")[0] for sentence in results[0][0]] == [f"rank 1 refused its {name}" for name in ("forward", "recompute", "backward")]


# --- refusals -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("field, value", [("fwd_num_comm_sms", 0), ("fwd_num_comm_sms", 3), ("fwd_num_comm_sms", 2.0), ("bwd_num_comm_sms", -2), ("minibatch_size", 100),
                                          ("minibatch_size", True), ("macrobatch_size", 5000), ("schedule_capacity_multiplier", 0.0),
                                          ("schedule_capacity_multiplier", float("inf")), ("schedule_capacity_multiplier", "1"), ("all_gather_top_experts_chunk_bytes", 20)])
def test_config_rules(field, value, device):
    with pytest.raises(ValueError, match=field):
        workspace(device, config=MF.MoKConfig(**{field: value}))


@pytest.mark.parametrize("arguments, kind", [(dict(device="cpu"), TypeError), (dict(num_local_tokens=-1), ValueError), (dict(num_local_tokens=1.5), ValueError),
                                             (dict(hidden_size=100), ValueError), (dict(topk=0), ValueError), (dict(topk=65), ValueError), (dict(group="world"), RuntimeError),
                                             (dict(device=torch.device("meta")), ValueError)], ids=str)
def test_workspace_arguments(arguments, kind, device):
    every = {"group": None, "device": device, "num_local_tokens": 10, "hidden_size": 128, "topk": 2, **arguments}
    with pytest.raises(kind):
        MF.create_workspace(MF.MoKConfig(), every.pop("group"), **every)


def test_schedule_arguments(device):
    config, w = workspace(device)
    ids = torch.zeros(50, 2, dtype=torch.int64, device=device)
    for bad, kind in ((ids.float(), TypeError), ([1, 2], TypeError), (ids[:, :1], ValueError), (ids.t().contiguous().t(), ValueError), (torch.zeros(51, 2, dtype=torch.int64), ValueError)):
        with pytest.raises(kind):
            MF.build_schedule(w, config, bad, num_local_experts=8)
    with pytest.raises(TypeError, match="MoKWorkspace"):
        MF.build_schedule("workspace", config, ids, num_local_experts=8)
    with pytest.raises(ValueError, match="num_local_experts"):
        MF.build_schedule(w, config, ids, num_local_experts=True)


def test_input_checks(device):
    p = reference.make(shared=64, device=device)
    config, w = workspace(device)
    schedule = MF.build_schedule(w, config, p.expert_ids, num_local_experts=8)

    def call(x=p.x, router_weights=p.router_weights, **changed):
        names = ("shared_gate", "shared_up", "shared_down", "gate", "up", "down")
        return MF.forward(config, w, schedule, x, router_weights, *(changed.get(n, getattr(p, n)) for n in names))

    _, context = call()
    for arguments, kind in (({"x": p.x.float()}, ValueError), ({"x": [1]}, TypeError), ({"x": p.x[:20]}, ValueError), ({"x": p.x.t().contiguous().t()}, ValueError),
                            ({"router_weights": p.router_weights.double()}, ValueError), ({"gate": p.gate.float()}, ValueError), ({"down": p.gate}, ValueError),
                            ({"gate": (p.gate, p.gate), "up": (p.up, p.up), "down": (p.down, p.down)}, ValueError), ({"gate": (p.gate, p.gate)}, TypeError),
                            ({"gate": None}, TypeError), ({"shared_up": p.shared_down}, ValueError)):
        with pytest.raises(kind):
            call(**arguments)
    with pytest.raises(ValueError, match="swiglu_limit"):
        MF.forward(config, w, schedule, p.x, p.router_weights, *weights_of(p), swiglu_limit=-1)
    with pytest.raises(ValueError, match="swiglu_limit is 2.0, it was 0.0"):
        MF.backward(config, w, schedule, context, p.dout, p.x, p.router_weights, *weights_of(p), swiglu_limit=2.0)
    with pytest.raises(TypeError, match="MoKForwardContext"):
        MF.backward(config, w, schedule, "context", p.dout, p.x, p.router_weights, *weights_of(p))


def test_get_workspace_is_made_once(device):
    arguments = dict(device=device, num_local_tokens=33, hidden_size=128, topk=2)
    a = MF.get_workspace(MF.MoKConfig(), None, **arguments)
    assert a is MF.get_workspace(MF.MoKConfig(), None, **arguments)
    MF.clear_workspace_cache()
    assert a is not MF.get_workspace(MF.MoKConfig(), None, **arguments)


# --- ranks --------------------------------------------------------------------------------------------------------------
def _published_on_ranks(world, p):
    rank, size = torch.distributed.get_rank(world), torch.distributed.get_world_size(world)
    config = MF.MoKConfig(minibatch_size=256, macrobatch_size=512)
    first, end = jobs.share(p.x.shape[0], size, rank)
    begin, count = mok.expert_range(p.gate.shape[0], size, rank)
    w = MF.create_workspace(config, world, device=torch.device("cpu"), num_local_tokens=end - first, hidden_size=128, topk=2)
    schedule = MF.build_schedule(w, config, p.expert_ids[first:end].contiguous(), num_local_experts=count)
    weights = (p.shared_gate, p.shared_up, p.shared_down, *(t[begin : begin + count].contiguous() for t in (p.gate, p.up, p.down)))
    x, rw = p.x[first:end].contiguous(), p.router_weights[first:end].contiguous()
    out, context = MF.forward(config, w, schedule, x, rw, *weights)
    grads = MF.backward(config, w, schedule, context, p.dout[first:end].contiguous(), x, rw, *weights)
    return {"out": out, **dict(zip(("x", "router_weights", "gate", "up", "down"), grads))}


@pytest.mark.parametrize("count, experts", [(2, 8), (4, 10)])
def test_the_published_calls_on_ranks(count, experts, device):
    if device.type != "cpu":
        pytest.skip("processes of the CPU")
    p = reference.make(tokens=90, experts=experts, shared=64)
    jobs.assert_same_bits(jobs.solve(mok.Group.local("cpu"), p), jobs.together(ranks.processes(count, _published_on_ranks, p, wants="process_group")), names=["out", "x", "gate", "up", "down"])


def _workspace_differs(world):
    hidden = 128 if torch.distributed.get_rank(world) == 0 else 192
    try:
        MF.create_workspace(MF.MoKConfig(), world, device=torch.device("cpu"), num_local_tokens=4, hidden_size=hidden, topk=2)
    except ValueError as error:
        return str(error)


def test_ranks_that_differ_in_width_are_a_value_error(device):
    if device.type != "cpu":
        pytest.skip("processes of the CPU")
    a, b = ranks.processes(2, _workspace_differs, wants="process_group")
    assert a == b and "128" in a and "192" in a


def _gathered(world):
    mine = torch.full((3, 2), torch.distributed.get_rank(world), dtype=torch.int32)
    buffer = torch.empty(2, 3, 2, dtype=torch.int32)
    mok.ops.all_gather_top_experts(mine, buffer, 0, 0, 2048, group=world)
    mok.ops.barrier_all(torch.zeros(1, dtype=torch.int32), [1, 1], 0, None, group=world)
    return buffer[:, 0, 0].tolist()


def test_ops_gather_and_barrier(device):
    ids, buffer = torch.ones(3, 2, dtype=torch.int32), torch.zeros(1, 3, 2, dtype=torch.int32)
    mok.ops.all_gather_top_experts(ids, buffer, 0, 0, 2048)
    mok.ops.barrier_all(torch.zeros(1), [1])
    assert torch.equal(buffer[0], ids)
    with pytest.raises(TypeError, match="pointers"):
        mok.ops.barrier_all(torch.zeros(1), (1, 2))
    with pytest.raises(ValueError, match="chunk_bytes"):
        mok.ops.all_gather_top_experts(ids, buffer, 0, 0, 100)
    if device.type == "cpu":
        assert ranks.processes(2, _gathered, wants="process_group") == [[0, 1]] * 2


def test_ops_schedule():
    ids = torch.randint(-1, 8, (2, 40, 2), dtype=torch.int32)
    table = mok.ops.schedule(ids, 4, 1024, 1)
    assert len(table.rank) == 1024 and int((table.rank >= 0).sum()) == int((ids >= 4).sum())
    for capacity, says in ((1000, "256"), (0, "256"), (256, "rows")):
        with pytest.raises(ValueError, match=says):
            mok.ops.schedule(ids, 4, capacity, 1)


def test_ops_epilogues():
    y, rows, w = torch.randn(10, 64).bfloat16(), torch.randn(30, 64).bfloat16(), torch.rand(10, 3)
    want = y.double() + (w.double()[:, :, None] * rows.double().view(10, 3, 64)).sum(1)
    assert torch.allclose(mok.ops.fwd_epilogue(y, rows, w).double(), want, rtol=1e-2, atol=1e-2)
    assert torch.allclose(mok.ops.bwd_epilogue(y, rows).double(), y.double() + rows.double().view(10, 3, 64).sum(1), rtol=1e-2, atol=1e-2)


def test_ops_mxfp8_quantize():
    """Blocks of 32, scales a power of two not below amax / 448, every element the nearest e4m3; zero, infinite and NaN elements."""
    x = (torch.randn(256, 128) * torch.logspace(-20, 20, 256)[:, None]).bfloat16()
    x[3, :32] = 0
    x[5, 7], x[6, 40] = float("nan"), float("inf")
    data, scales, t_data, t_scales = mok.ops.mxfp8_quantize(x, True, True)
    assert data.shape == (256, 128) and scales.shape == (2, 1, 32, 16) and t_data.shape == (128, 256) and t_scales.shape == (1, 2, 32, 16)
    bytes_of = torch.tensor([[int(scales[r // 128, 0, r % 32, (r % 128) // 32 * 4 + b]) for b in range(4)] for r in range(256)])
    blocks, finite = x.double().view(256, 4, 32), x.view(256, 4, 32).isfinite()
    largest = torch.where(finite, blocks.abs(), 0).amax(-1)
    exponent = torch.where(largest > 0, torch.ceil(torch.log2(largest.clamp(min=1e-300) / 448)), -39).clamp(-39, 119)
    assert torch.equal(bytes_of.double(), exponent + 127) and bytes_of[3, 0] == 88
    wide = data.double().view(256, 4, 32) * 2.0 ** exponent[:, :, None]
    assert (wide[5, 0, 7].isnan() and wide[6, 1, 8].isnan()) and (wide.isnan() == ~finite).all()
    assert ((wide - blocks)[finite].abs() <= (blocks.abs() * 2.0**-4 + 2.0 ** (exponent[:, :, None] - 10))[finite]).all()
    assert torch.equal(t_data.view(torch.uint8), mok.ops.mxfp8_quantize(x.t().contiguous())[0].view(torch.uint8)) and mok.ops.mxfp8_quantize(x)[2] is None
    with pytest.raises(ValueError, match="multiples of 32"):
        mok.ops.mxfp8_quantize(x[:100])
    with pytest.raises(TypeError, match="return_normal"):
        mok.ops.mxfp8_quantize(x, 1)


def test_ops_fused_passes_name_what_to_call():
    with pytest.raises(NotImplementedError, match="mok.functional.forward"):
        mok.ops.dispatch_mlp_swiglu_combine_fwd_bf16(1, 2, 3)
