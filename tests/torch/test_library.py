"""The ctypes mirror of mok.h is what the C compiler says, and errors are exceptions."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import mok
from mok import _library as lib

STRUCTS = {"mok_config": lib.Config, "mok_buffer_info": lib.BufferInfo, "mok_pass_plan": lib.PassPlan, "mok_plan": lib.Plan, "mok_provider": lib.Provider,
           "mok_bootstrap": lib.Bootstrap, "mok_weight": lib.Weight, "mok_weights": lib.Weights, "mok_grad": lib.Grad, "mok_grads": lib.Grads, "mok_schedule_args": lib.ScheduleArgs,
           "mok_forward_args": lib.ForwardArgs, "mok_backward_args": lib.BackwardArgs, "mok_stats": lib.Stats, "mok_schedule_info": lib.ScheduleInfo,
           "mok_backend_info": lib.BackendInfo, "mok_mx_quantise_args": lib.MxQuantiseArgs, "mok_mx_widen_args": lib.MxWidenArgs,
           "mok_trace_event": lib.TraceEvent, "mok_trace_clock": lib.TraceClock, "mok_finding": lib.Finding}
VALUES = {"MOK_BACKEND_CPU": lib.BACKEND["cpu"], "MOK_BACKEND_CUDA": lib.BACKEND["cuda"], "MOK_BF16": lib.BF16, "MOK_FP32": lib.FP32, "MOK_MXFP8": lib.MXFP8,
          "MOK_GATE_UP_SEPARATE": lib.GATE_UP["separate"], "MOK_GATE_UP_COMBINED": lib.GATE_UP["combined"], "MOK_GATE_UP_INTERLEAVED": lib.GATE_UP["interleaved"],
          "MOK_WEIGHT_NK": lib.WEIGHT_LAYOUT["nk"], "MOK_WEIGHT_KN": lib.WEIGHT_LAYOUT["kn"], "MOK_SAVE_AUTO": lib.SAVE["auto"], "MOK_SAVE_NONE": lib.SAVE["none"],
          "MOK_SAVE_RING": lib.SAVE["ring"], "MOK_SAVE_ALL": lib.SAVE["all"], "MOK_SAVE_ROWS": lib.SAVE_ROWS, "MOK_BACKWARD_ALL": lib.BACKWARD_ALL,
          "MOK_BACKWARD_DATA": lib.BACKWARD_DATA, "MOK_BACKWARD_WEIGHTS": lib.BACKWARD_WEIGHTS, "MOK_MEM_HEAP": lib.MEM_HEAP, "MOK_MEM_CONTEXT": lib.MEM_CONTEXT,
          "MOK_CALL_SCHEDULE": lib.CALL_SCHEDULE, "MOK_CALL_FORWARD": lib.CALL_FORWARD, "MOK_CALL_RECOMPUTE": lib.CALL_RECOMPUTE, "MOK_CALL_BACKWARD": lib.CALL_BACKWARD,
          "MOK_API_VERSION": lib.API_VERSION, **{f"MOK_{s.name}": int(s) for s in lib.Status}}


def header():
    for path in (Path(mok.__file__).parent / "mok.h", Path(__file__).resolve().parents[2] / "include" / "mok.h"):
        if path.exists():
            return path
    raise AssertionError("mok.h is neither in the package nor in the source tree")


def test_structs_are_those_of_the_header(tmp_path):
    lines = []
    for name, struct in STRUCTS.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        lines += [f'printf("{name}.{field[0]} %zu\\n", offsetof({name}, {field[0]}));' for field in struct._fields_]
    lines += [f'printf("{name} %d\\n", (int){name});' for name in VALUES]
    source, program = tmp_path / "layout.c", tmp_path / "layout"
    source.write_text('#include <stdio.h>\n#include "mok.h"\nint main(void) {\n' + "\n".join(lines) + "\nreturn 0; }\n")
    compiler = shutil.which("cc") or shutil.which("gcc")
    subprocess.run([compiler, "-std=c11", f"-I{header().parent}", str(source), "-o", str(program)], check=True)
    said = dict(line.rsplit(" ", 1) for line in subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.splitlines())
    for name, struct in STRUCTS.items():
        assert int(said[name]) == ctypes.sizeof(struct), name
        for field in struct._fields_:
            assert int(said[f"{name}.{field[0]}"]) == getattr(struct, field[0]).offset, f"{name}.{field[0]}"
    for name, value in VALUES.items():
        assert int(said[name]) == value, name


def test_no_struct_and_no_function_of_the_header_is_missing():
    text = header().read_text().split("#ifdef MOK_EXPERIMENTAL")[0]
    assert set(re.findall(r"^} (mok_\w+);", text, re.M)) - {"mok_status", "mok_dtype", "mok_backend_id", "mok_activation", "mok_gate_up", "mok_weight_layout", "mok_save",
                                                             "mok_memory_kind", "mok_backward_parts", "mok_trace_kind", "mok_trace_format", "mok_call_kind", "mok_finding_state"} == set(STRUCTS)
    assert set(re.findall(r"MOK_API [\w *]*?(mok_\w+)\(", text)) == set(lib._FUNCTIONS)


def test_versions_agree():
    assert lib.library().mok_api_version() >= lib.API_VERSION
    assert mok.__version__ == mok.version()


@pytest.mark.parametrize("status, kind", [(lib.Status.E_ARG, ValueError), (lib.Status.E_SHAPE, ValueError), (lib.Status.E_ROUTE, ValueError), (lib.Status.E_STATE, ValueError),
                                          (lib.Status.E_UNSUPPORTED, NotImplementedError), (lib.Status.E_MEMORY, RuntimeError), (lib.Status.E_ENV, RuntimeError),
                                          (lib.Status.E_MISMATCH, ValueError), (lib.Status.E_MISMATCH, RuntimeError), (lib.Status.E_PEER, RuntimeError),
                                          (lib.Status.E_TIMEOUT, RuntimeError), (lib.Status.E_DEVICE, RuntimeError), (lib.Status.E_BUG, RuntimeError)])
def test_every_status_is_an_exception(status, kind):
    error = lib.exception_for(status, "a sentence")
    assert isinstance(error, kind) and isinstance(error, mok.Error) and str(error) == "a sentence" and error.status == status


def test_the_library_s_sentence_arrives():
    with pytest.raises(ValueError, match="hidden is 255: it must be a multiple of 64"):
        lib.plan(lib.Config(hidden=255, intermediate=64, num_experts=1, topk=1, max_tokens=1))


def test_memory_map_adds_up():
    config = lib.Config(hidden=128, intermediate=64, num_experts=8, topk=2, max_tokens=10)
    plan, sizes = lib.plan(config, 4, 1), {}
    for info in lib.buffers(config, 4, 1):
        sizes[info.kind] = max(sizes.get(info.kind, 0), info.offset + info.bytes)
    assert sizes[lib.MEM_HEAP] <= plan.heap_bytes and sizes[lib.MEM_CONTEXT] <= plan.context_bytes


def test_expert_ranges_cover_all_experts():
    for experts, count in ((10, 4), (3, 8), (384, 72)):
        ranges = [mok.expert_range(experts, count, r) for r in range(count)]
        assert [first for first, _ in ranges] == [sum(n for _, n in ranges[:r]) for r in range(count)] and sum(n for _, n in ranges) == experts


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("MOK_LIBRARY", str(tmp_path / "nowhere.so"))
    with pytest.raises(ImportError, match="nowhere.so"):
        lib._open()
    (tmp_path / "empty.so").write_bytes(b"")
    monkeypatch.setenv("MOK_LIBRARY", str(tmp_path / "empty.so"))
    with pytest.raises(ImportError, match="could not be loaded"):
        lib._open()


def test_nothing_is_linked_against_torch_or_cuda():
    needed = subprocess.run(["readelf", "-d", str(lib.library().path)], capture_output=True, text=True, check=True).stdout
    assert not re.search(r"NEEDED.*(torch|cuda|python)", needed)
