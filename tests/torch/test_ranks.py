"""Ranks as processes: the same bits for any number of them, clear errors for all when one is wrong, late or gone."""

import os
import time

import jobs
import pytest
import ranks
import reference
import torch
import torch.multiprocessing as multiprocessing

import mok

SHAPES = {
    "plain": dict(tokens=90),
    "uneven_experts": dict(tokens=61, experts=10, topk=3),
    "fewer_experts_than_ranks": dict(tokens=33, experts=3, topk=2),
    "shared": dict(tokens=70, shared=64, output_gate=True),
    "dropped": dict(tokens=64, dropped=0.3),
    "limit": dict(tokens=64, limit=0.8),
    "combined": dict(tokens=64, gate_up="combined"),
}


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_bits_are_those_of_one_process(name, count, device, run_ranks):
    p = reference.make(**SHAPES[name])
    alone = jobs.solve(mok.Group.local(device), p)
    joined = jobs.together(run_ranks(count, jobs.solve, p))
    jobs.assert_same_bits(alone, joined)
    for part in joined:
        if part.startswith("shared"):  # sums over ranks are the caller's, and round where the caller rounds
            assert reference.error(joined[part], alone[part].double()) < 0.02


@pytest.mark.parametrize("count", [2, 3, 4])
def test_ranks_as_threads_give_the_same_bits(count, device):
    p = reference.make(tokens=50)
    jobs.assert_same_bits(jobs.solve(mok.Group.local(device), p), jobs.together(ranks.threads(count, jobs.solve, p, device=device)))


@pytest.mark.parametrize("options", [dict(recompute=True), dict(save="all"), dict(save="none")], ids=str)
def test_save_policies_give_the_same_bits_on_ranks(options, device, run_ranks):
    p = reference.make(tokens=300, experts=4)
    jobs.assert_same_bits(jobs.solve(mok.Group.local(device), p), jobs.together(run_ranks(2, _solve_with, p, options)))


def _solve_with(group, p, options):
    return jobs.solve(group, p, **options)


@pytest.mark.parametrize("members", [(1, 3), (0, 2, 3), (1, 2)], ids=str)
def test_any_subgroup_of_the_world(members, device):
    if device.type != "cpu":
        pytest.skip("processes with a GPU each")
    p = reference.make(tokens=50)
    jobs.assert_same_bits(jobs.solve(mok.Group.local("cpu"), p), jobs.together(ranks.processes(len(members), jobs.solve, p, members=members)))


def test_two_groups_at_the_same_time(device):
    """EP 2 times DP 2: two groups of two, each with its own tokens."""
    if device.type != "cpu":
        pytest.skip("processes with a GPU each")
    results = ranks.processes(4, _expert_and_data_parallel, wants="process_group")
    for half, seed in ((results[:2], 1), (results[2:], 2)):
        jobs.assert_same_bits(jobs.solve(mok.Group.local("cpu"), reference.make(seed=seed)), jobs.together(half))


def _expert_and_data_parallel(world):
    import torch.distributed as dist

    rank = dist.get_rank(world)
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return jobs.solve(mok.Group.of(halves[rank // 2], "cpu", ranks.TIMEOUT), reference.make(seed=1 + rank // 2))


def test_nothing_stays_in_shared_memory(device):
    if device.type != "cpu":
        pytest.skip("shared memory of the CPU")
    ranks.processes(4, jobs.solve, reference.make())
    assert [name for name in os.listdir("/dev/shm") if name.startswith("mok-")] == []


def test_max_tokens_is_agreed_once(device):
    if device.type != "cpu":
        pytest.skip("threads must be told")
    p = reference.make(tokens=150)
    assert ranks.processes(2, _grow, p) == [256, 256]


def _grow(group, p):
    engine = mok.engine(group=group, hidden=128, intermediate=64, num_experts=8, topk=2)
    first, count = engine.first_expert, engine.num_local_experts
    weights = [w[first : first + count].contiguous() for w in (p.gate, p.up, p.down)]
    tokens = 130 if group.rank == 1 else 5
    mok.moe(p.x[:tokens], p.expert_ids[:tokens], p.router_weights[:tokens], *weights, engine=engine)
    return engine.workspace(0).config.max_tokens


# --- disagreement -------------------------------------------------------------------------------------------------------
def _expect(function, kind):
    try:
        function()
    except kind as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was refused")


def _differ_in_shape(group, tokens):
    return _expect(lambda: mok.Workspace(mok.Shape(128 if group.rank != 1 else 192, 64, 8, 2, tokens), group), ValueError)


def test_ranks_that_disagree_all_get_the_same_sentence(run_ranks):
    sentences = run_ranks(4, _differ_in_shape, 10)
    assert set(sentences) == {"MismatchError: hidden is 128 on rank 0, but 192 on rank 1: it must be the same on all ranks of a group"}


def _one_has_a_bad_shape(group):
    return _expect(lambda: mok.Workspace(mok.Shape(128, 64 if group.rank != 2 else 65, 8, 2, 10), group), ValueError)


def test_one_rank_s_bad_shape_is_everybody_s_error(run_ranks):
    sentences = run_ranks(3, _one_has_a_bad_shape)
    assert len(set(sentences)) == 1 and "rank 2: intermediate is 65" in sentences[0]


def _too_many_tokens(group, p):
    p = p.on(group.device)
    engine = mok.engine(group=group, hidden=128, intermediate=64, num_experts=8, topk=2, max_tokens=20)
    first, count = engine.first_expert, engine.num_local_experts
    weights = [w[first : first + count].contiguous() for w in (p.gate, p.up, p.down)]
    tokens = 21 if group.rank == 1 else 20
    sentence = _expect(lambda: mok.moe(p.x[:tokens], p.expert_ids[:tokens], p.router_weights[:tokens], *weights, engine=engine), (ValueError, RuntimeError))
    out = mok.moe(p.x[:20], p.expert_ids[:20], p.router_weights[:20], *weights, engine=engine)  # and the next call works
    return sentence, out


def test_S9_one_token_too_many_on_one_rank_raises_on_all(run_ranks):
    p = reference.make(tokens=30)
    results = run_ranks(2, _too_many_tokens, p)
    for sentence, out in results:
        assert "21" in sentence and "20" in sentence and out.isfinite().all()
    assert results[1][0].startswith("CallerError") and "rank 1 refused" in results[0][0]


def _wrong_in_the_first_call(group, max_tokens):
    layer = mok.MoE(64, 64, 4, 2, max_tokens=max_tokens, group=group, device=group.device)
    x, mine = torch.randn(20, 64, device=group.device).bfloat16(), group.rank == 1
    wrong = (lambda: layer(x[:, :32]), lambda: layer(x, x, x), lambda: layer(x, torch.zeros(20, 3, dtype=torch.int64), x), lambda: layer(x, None, x),
             lambda: layer(x, mask=torch.ones(19, dtype=torch.bool, device=group.device)))
    sentences = [_expect(call if mine else lambda: layer(x), (TypeError, ValueError, RuntimeError)) for call in wrong]
    return sentences, layer(x).detach()


@pytest.mark.parametrize("max_tokens", [64, None])
def test_what_is_wrong_in_a_rank_s_first_call_is_told_to_the_others(max_tokens, device, run_ranks):
    if device.type != "cpu" and max_tokens is None:
        pytest.skip("ranks that are threads need max_tokens")
    start = time.monotonic()
    (others, out), (mine, _) = run_ranks(2, _wrong_in_the_first_call, max_tokens)
    assert time.monotonic() - start < ranks.TIMEOUT / 2 and out.isfinite().all()
    says = ("x is [20, 32]: its last size must be 64", "expert_ids is [20, 64]: x has 20 tokens", "expert_ids is [20, 3]: x has 20 tokens",
            "router_weights is given without expert_ids", "mask is [19]: it must be [20]")
    for told, own, words in zip(others, mine, says):
        assert words in own and words in told and "rank 1" in told and "refused" in told


def _wrong_on_one_rank(group, p):
    p = p.on(group.device)
    engine = mok.engine(group=group, hidden=128, intermediate=64, num_experts=8, topk=2, max_tokens=64)
    first, count = engine.first_expert, engine.num_local_experts
    weights = [w[first : first + count].contiguous() for w in (p.gate, p.up, p.down)]
    engine.prepare()
    wrong = {0: lambda: mok.moe(p.x.float(), p.expert_ids, p.router_weights, *weights, engine=engine), 1: lambda: mok.moe(p.x, p.expert_ids[:, :1], p.router_weights, *weights, engine=engine)}
    sentences = []
    for culprit, call in wrong.items():
        mine = call if group.rank == culprit else lambda: mok.moe(p.x, p.expert_ids, p.router_weights, *weights, engine=engine)
        sentences.append(_expect(mine, (TypeError, ValueError, RuntimeError)))
    return sentences, mok.moe(p.x, p.expert_ids, p.router_weights, *weights, engine=engine)


def test_what_python_refuses_on_one_rank_fails_on_the_others_at_once(run_ranks):
    start = time.monotonic()
    (first, out), (second, _) = run_ranks(2, _wrong_on_one_rank, reference.make())
    assert time.monotonic() - start < ranks.TIMEOUT / 2
    assert first[0].startswith("TypeError: x is torch.float32") and "rank 0 refused" in second[0] and "x is torch.float32" in second[0]
    assert second[1].startswith("ValueError: expert_ids is [50, 1]") and "rank 1 refused" in first[1]
    assert out.isfinite().all()


def _bad_route(group, p):
    engine = mok.engine(group=group, hidden=128, intermediate=64, num_experts=8, topk=2, max_tokens=64)
    ids = p.expert_ids.clone().to(group.device)
    if group.rank == 1:
        ids[7, 1] = 8
    return _expect(lambda: (engine.schedule(ids), engine.wait()), ValueError)


def test_a_bad_expert_id_is_named_on_all_ranks(run_ranks):
    sentences = run_ranks(2, _bad_route, reference.make(tokens=20))
    assert len(set(sentences)) == 1 and "rank 1" in sentences[0] and "token 7" in sentences[0] and "8" in sentences[0]


# --- ranks that are late or gone ----------------------------------------------------------------------------------------
def _go_on_without_rank_1(p):
    import torch.distributed as dist

    mok.close_all()
    with open("/proc/self/maps") as maps:
        left = sum("/mok-" in line for line in maps)
    group = dist.new_group([0, 2], use_local_synchronization=True)
    joined, alone = jobs.solve(mok.Group.of(group, "cpu", timeout=30.0), p), jobs.solve(mok.Group.local("cpu"), p)
    tokens = slice(0, 25) if dist.get_rank() == 0 else slice(25, 50)
    return f"; {left} heaps left; {'the same bits' if torch.equal(joined['out'], alone['out'][tokens]) else 'OTHER BITS'} without it"


def _end_badly(rank, world, port, how, results):
    import torch.distributed as dist

    ranks.join_world(rank, world, port)
    p, sentence = reference.make(), "fine"
    try:
        if how == "absent" and rank == 1:
            time.sleep(20)
            os._exit(0)
        group = mok.Group.of(dist.group.WORLD, "cpu", timeout=2.0)
        engine = mok.engine(group=group, hidden=128, intermediate=64, num_experts=8, topk=2, max_tokens=64)
        if how == "before_creation" and rank == 1:
            os._exit(9)
        engine.prepare()
        if how == "in_a_step" and rank == 1:
            os._exit(9)
        if how == "stopped" and rank == 1:
            os.kill(os.getpid(), 19)
        jobs.solve(group, p, engine=engine)
    except Exception as error:
        sentence = f"{type(error).__name__}: {error}"
        sentence += _go_on_without_rank_1(p)
    results.put((rank, sentence))
    results.close()
    results.join_thread()
    if rank == 0:
        time.sleep(1.0)  # it holds the store that names the absent
    os._exit(0)


@pytest.mark.parametrize("how, says", [("before_creation", "rank 1"), ("in_a_step", "waited 2000 ms for rank 1 in schedule"), ("stopped", "waited 2000 ms for rank 1 in schedule")])
def test_F1_a_rank_that_dies_or_stops_is_named_by_the_others(how, says, device):
    if device.type != "cpu":
        pytest.skip("processes of the CPU")
    context, port = multiprocessing.get_context("spawn"), ranks.free_port()
    results = context.Queue()
    processes = [context.Process(target=_end_badly, args=(r, 3, port, how, results), daemon=True) for r in range(3)]
    for process in processes:
        process.start()
    said = dict(results.get(timeout=120) for _ in (0, 2))
    for process in processes:
        process.kill()
    for rank in (0, 2):
        assert says in said[rank] and said[rank].startswith("RunError"), said
        assert said[rank].endswith("; 0 heaps left; the same bits without it"), said


# --- ways to say which group --------------------------------------------------------------------------------------------
def test_group_arguments_are_checked():
    with pytest.raises(RuntimeError, match="init_process_group"):
        mok.Group.of(None, "cpu")
    with pytest.raises(RuntimeError, match="not initialised"):
        mok.engine(group="world", hidden=64, intermediate=64, num_experts=1, topk=1)
    with pytest.raises(ValueError, match="cpu and cuda"):
        mok.Group.local("meta")


def _wrong_group(world):
    return [_expect(lambda: mok.engine(group=wrong, device="cpu", hidden=64, intermediate=64, num_experts=4, topk=1), TypeError) for wrong in ("world", 4)]


def test_a_group_of_a_wrong_type_is_a_type_error(device):
    if device.type != "cpu":
        pytest.skip("processes of the CPU")
    assert all("ProcessGroup" in s for sentences in ranks.processes(2, _wrong_group, wants="process_group") for s in sentences)


def _module_on_ranks(world):
    """A model built on ranks that were seeded alike has the experts that a single process would have."""
    torch.manual_seed(7)
    layer = mok.MoE(128, 64, 8, 2, shared_intermediate=64, group=world, max_tokens=64, device="cpu")
    g = torch.Generator().manual_seed(3)
    x = torch.randn(40, 128, generator=g).bfloat16()
    rank, size = torch.distributed.get_rank(world), torch.distributed.get_world_size(world)
    mine = x[40 * rank // size : 40 * (rank + 1) // size].requires_grad_()
    out = layer(mine)
    out.backward(torch.ones_like(out))
    return {"out": out.detach(), "x": mine.grad, "gate": layer.gate.grad, "down": layer.down.grad, "weights": layer.gate.detach().clone()}


def test_MoE_on_ranks_is_MoE_on_one(device):
    if device.type != "cpu":
        pytest.skip("processes of the CPU")
    torch.manual_seed(7)
    layer = mok.MoE(128, 64, 8, 2, shared_intermediate=64, max_tokens=64, device="cpu")
    x = torch.randn(40, 128, generator=torch.Generator().manual_seed(3)).bfloat16().requires_grad_()
    out = layer(x)
    out.backward(torch.ones_like(out))
    alone = {"out": out.detach(), "x": x.grad, "gate": layer.gate.grad, "down": layer.down.grad, "weights": layer.gate.detach()}
    for count in (2, 4):
        jobs.assert_same_bits(alone, jobs.together(ranks.processes(count, _module_on_ranks, wants="process_group")))
