"""Wrong calls from Python: one sentence with what is wrong and the numbers, and the next call works."""

import os

import pytest
import reference
import torch

import mok

SIZES = dict(hidden=128, intermediate=64, num_experts=8, topk=2, device="cpu")


def call(**changed):
    p = reference.make(tokens=16)
    arguments = dict(x=p.x, expert_ids=p.expert_ids, router_weights=p.router_weights, gate=p.gate, up=p.up, down=p.down)
    return mok.moe(**{**arguments, **{name: value(p) if callable(value) else value for name, value in changed.items()}})


@pytest.mark.parametrize("changed, kind, words", [
    (dict(x=None), TypeError, "x is a NoneType: it must be a tensor"),
    (dict(x=lambda p: p.x.float()), TypeError, "x is torch.float32: it must be torch.bfloat16"),
    (dict(x=lambda p: p.x.to("meta")), ValueError, "device is meta: MoK runs on cpu and cuda"),
    (dict(x=lambda p: p.x[:5]), ValueError, "router_weights has 16 tokens, x has 5"),
    (dict(expert_ids=None), TypeError, "expert_ids is a NoneType"),
    (dict(expert_ids=lambda p: p.expert_ids[:, 0]), ValueError, "expert_ids is [16]: it must be [..., K]"),
    (dict(expert_ids=lambda p: p.expert_ids.short()), TypeError, "expert_ids is torch.int16"),
    (dict(expert_ids=lambda p: torch.full_like(p.expert_ids, 8)), ValueError, "rank 0, token 0, k 0: expert id 8 is outside [-1, 8)"),
    (dict(expert_ids=lambda p: torch.full_like(p.expert_ids, -(2**63))), ValueError, "expert id -2147483648 is outside [-1, 8)"),
    (dict(router_weights=None), TypeError, "router_weights is a NoneType"),
    (dict(router_weights=lambda p: p.router_weights.double()), ValueError, "router_dtype is torch.float64"),
    (dict(gate=None), ValueError, "gate is None: it must be [El, I, H]"),
    (dict(gate=lambda p: p.gate[0]), ValueError, "gate is [64, 128]: it must be [El, I, H]"),
    (dict(gate=lambda p: p.gate.to_sparse()), TypeError, "gate is torch.sparse_coo: it must be dense"),
    (dict(gate=lambda p: [None, *p.gate[1:]], up=lambda p: list(p.up), down=lambda p: list(p.down)), TypeError, "gate[0] is a NoneType"),
    (dict(up=None), ValueError, "up is missing: it must be [8, 64, 128]"),
    (dict(down=lambda p: p.down.mT), ValueError, "down is [8, 64, 128]: it must be [8, 128, 64]"),
    (dict(timeout=0), ValueError, "timeout is 0 s: it must be above 0"),
    (dict(timeout=float("nan")), ValueError, "timeout is nan s"),
    (dict(timeout=float("inf")), ValueError, "it must be from 0 to 2592000000"),
], ids=str)
def test_a_wrong_argument_is_named(changed, kind, words):
    with pytest.raises(kind) as refusal:
        call(**changed)
    assert words in str(refusal.value)
    assert call().shape == (16, 128)


@pytest.mark.parametrize("changed, kind, words", [
    (dict(hidden=100), ValueError, "hidden is 100: it must be a multiple of 64"),
    (dict(intermediate=2**70), ValueError, f"intermediate is {2**70}: it must fit 64 bits"),
    (dict(cpu_threads=2**40), ValueError, f"cpu_threads is {2**40}: it must fit 32 bits"),
    (dict(topk=9), ValueError, "topk 9 is larger than num_experts 8"),
    (dict(topk=1.5), TypeError, "topk is 1.5: it must be a whole number"),
    (dict(save="some"), ValueError, "save is 'some': it must be one of"),
], ids=str)
def test_a_wrong_shape_is_named(changed, kind, words):
    with pytest.raises(kind) as refusal:
        mok.engine(**{**SIZES, **changed})
    assert words in str(refusal.value)


def test_memory_that_is_too_small_is_not_read():
    p, engine = reference.make(tokens=16), mok.engine(**SIZES, max_tokens=16)
    good = engine.schedule(p.expert_ids)
    for schedule in (good[:-1], good.float(), torch.empty(2 * good.numel(), dtype=torch.uint8)[::2]):
        with pytest.raises(ValueError, match=f"must be the {good.numel()} bytes on cpu"):
            call(engine=engine, schedule=schedule)
    assert torch.equal(call(engine=engine, schedule=good), call())


@pytest.mark.parametrize("changed, words", [
    (dict(hidden=128.0), "hidden is 128.0: it must be a whole number"),
    (dict(topk=True), "topk is True: it must be a whole number"),
    (dict(layer="a"), "layer is 'a': it must be a whole number"),
    (dict(timeout="5"), "timeout is '5': it must be a number of seconds"),
    (dict(ring=5), "there is no option ring: besides those by name, MoE takes ring_rows, "),
], ids=str)
def test_a_layer_s_wrong_option_is_named(changed, words):
    mok.MoE(**SIZES)  # the engine of these sizes is there already
    with pytest.raises(TypeError) as refusal:
        mok.MoE(**{**SIZES, **changed})
    assert words in str(refusal.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int8, "fp16", None], ids=str)
def test_a_dtype_that_no_call_would_take_is_refused_at_once(dtype):
    with pytest.raises(ValueError) as refusal:
        mok.MoE(**SIZES, dtype=dtype)
    assert f"dtype is {dtype!r}: it must be torch.bfloat16, torch.float32 (for calls under autocast)" in str(refusal.value)


def test_a_layers_input_and_mask_are_looked_at_first():
    layer = mok.MoE(**SIZES)
    x = torch.randn(4, 128, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"x is \[4, 64\]: its last size must be 128"):
        layer(x[:, :64])
    with pytest.raises(ValueError, match=r"mask is \[3\]: it must be \[4\]"):
        layer(x, mask=torch.ones(3, dtype=torch.bool))
    with pytest.raises(TypeError, match="mask is torch.int64: it must be torch.bool"):
        layer(x, mask=torch.ones(4, dtype=torch.int64))
    assert layer(x, mask=torch.ones(4, dtype=torch.bool)).shape == x.shape


def test_the_default_time_out_is_the_library_s(monkeypatch):
    monkeypatch.setenv("MOK_TIMEOUT_MS", "1500")
    assert mok.Group.local("cpu").timeout == 1.5
    assert mok.Group.local("cpu", timeout=0.25).timeout == 0.25
    assert mok.engine(**SIZES, max_tokens=32).prepare().config.timeout_ms == 1500
    monkeypatch.setenv("MOK_TIMEOUT_MS", "12s")
    with pytest.raises(mok.Error, match='MOK_TIMEOUT_MS is "12s" in the environment'):
        mok.MoE(**SIZES)
    assert mok.Group.local("cpu", timeout=7).timeout == 7
    monkeypatch.delenv("MOK_TIMEOUT_MS")
    assert mok.Group.local("cpu").timeout == 600


def test_a_closed_workspace_says_so():
    workspace = mok.engine(**SIZES, max_tokens=31).prepare()
    workspace.close()
    for use in (workspace.wait, workspace.stats, lambda: workspace.schedule(torch.zeros(4, 2, dtype=torch.int32))):
        with pytest.raises(ValueError, match="this workspace is closed"):
            use()


def test_a_forked_child_is_told_and_can_begin_anew():
    call()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            with pytest.raises(ValueError, match="before the process was forked"):
                call()
            mok.close_all()
            status = 0 if call().shape == (16, 128) else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert call().shape == (16, 128)
