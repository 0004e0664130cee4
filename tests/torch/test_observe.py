"""mok.trace and mok.doctor."""

import json
from ctypes import byref, c_int32

import pytest
import ranks
import torch

import mok
from mok import _library as lib


def make(device):
    torch.manual_seed(3)
    return mok.MoE(128, 64, 4, 2, max_tokens=64, device=device)


def test_a_step_is_traced_and_has_the_same_bits(device, tmp_path):
    layer = make(device)
    x = torch.randn(20, 128).bfloat16().to(device)
    plain = layer(x).detach()
    with mok.trace(layer) as seen:
        out = layer(x)
        out.float().sum().backward()
    assert torch.equal(out.detach(), plain)
    kinds = seen.kinds()
    assert kinds["call"] == 3  # schedule, forward, backward
    assert kinds["s2_gate_up"] > 0 and kinds["s4_down"] > 0 and kinds["s4_down_bwd"] > 0 and kinds["wgrad"] > 0
    assert seen.lost == 0
    assert all(event.end_ns >= event.begin_ns for event in seen.events)
    seen.save(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == len(seen.events)
    seen.save(tmp_path / "step.svg")
    assert (tmp_path / "step.svg").read_text().startswith("<svg")
    assert "longest waits" in str(seen)
    with pytest.raises(ValueError, match="'.png'"):
        seen.save(tmp_path / "step.png")


def _trace_together(process_group):
    import torch.distributed as dist

    torch.manual_seed(3)
    layer = mok.MoE(128, 64, 4, 2, max_tokens=64, group=process_group)
    x = torch.randn(20, 128).bfloat16()
    layer(x)
    with mok.trace(layer) as seen:
        for _ in range(5):
            layer(x)
    alone = len(seen.events)
    seen.together(process_group)
    # Clocks of a GPU each, made up: the last rank's is a second ahead.
    shifted = (lib.TraceEvent * len(seen.events)).from_buffer_copy(bytes(seen.events))
    for event in shifted:
        if event.rank == 1:
            event.begin_ns += 10**9
            event.end_ns += 10**9
    clocks, count = (lib.TraceClock * 2)(), c_int32(2)
    lib.check(lib.library().mok_trace_align(shifted, len(shifted), clocks, byref(count)))
    dist.barrier(process_group)
    return alone, len(seen.events), {e.rank for e in seen.events}, len(seen.clocks), [(c.rank, c.barriers, c.offset_ns, c.accuracy_ns) for c in clocks]


def test_traces_of_several_processes_come_together(device):
    if device.type == "cuda":
        pytest.skip("processes need a GPU each")
    found = ranks.processes(2, _trace_together, wants="process_group")
    for alone, everything, members, clocks, aligned in found:
        assert everything == found[0][0] + found[1][0] and alone > 0
        assert members == {0, 1} and clocks == 0  # one clock on the CPU
        assert aligned[0] == (0, 15, 0, 0)  # five schedules with one barrier, five forwards with two
        rank, barriers, offset, accuracy = aligned[1]
        assert (rank, barriers) == (1, 15) and abs(offset - 10**9) < 10**8 and accuracy < 10**8


def test_a_layer_without_a_workspace_is_refused(device):
    with pytest.raises(ValueError, match="prepare"):
        with mok.trace(mok.MoE(192, 64, 5, 2, max_tokens=64, device=device)):  # a shape that no other test opens
            pass


def test_the_doctor_says_what_works(monkeypatch):
    findings = {f.check: f for f in mok.doctor()}
    assert "works" in findings["verdict"].detail
    assert findings["library"].detail.startswith(f"mok {mok.version()}")
    monkeypatch.setenv("MOK_DOCTOR_FAULT", "driver")
    findings = {f.check: f for f in mok.doctor()}
    assert findings["driver"].state == "bad" and "install the NVIDIA driver" in findings["driver"].advice
    assert findings["peer access"].state == "skipped"
