"""mok.trace and mok.doctor."""

import json

import pytest
import torch

import mok


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
