"""libmok.so through its C ABI: the structs and functions of mok.h for ctypes, and its errors as exceptions.

Everything here has the name it has in mok.h, which is the manual. tests/torch/test_library.py compares sizes and offsets with what the C
compiler says.
"""

from __future__ import annotations

import ctypes
import enum
import os
import threading
from ctypes import POINTER, byref, c_bool, c_char, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path

API_VERSION = 1


class Status(enum.IntEnum):
    OK = 0
    NOT_READY = 1
    E_ARG = 2
    E_SHAPE = 3
    E_ROUTE = 4
    E_STATE = 5
    E_UNSUPPORTED = 6
    E_MEMORY = 20
    E_ENV = 21
    E_MISMATCH = 40
    E_PEER = 41
    E_TIMEOUT = 42
    E_DEVICE = 60
    E_BUG = 80


# --- errors -------------------------------------------------------------------------------------------------------------
class Error(Exception):
    """What libmok refused or could not do, in its own sentence. `status` is the code of mok.h."""

    def __init__(self, sentence: str, status: int = Status.E_BUG):
        super().__init__(sentence)
        self.status = status


class CallerError(Error, ValueError):
    """Status 1 to 19: what was passed is wrong or does not fit together."""


class UnsupportedError(Error, NotImplementedError):
    """MOK_E_UNSUPPORTED."""


class MismatchError(Error, ValueError, RuntimeError):
    """MOK_E_MISMATCH: ranks called with different arguments."""


class RunError(Error, RuntimeError):
    """Memory, machine, other ranks, device."""


def exception_for(status: int, sentence: str) -> Error:
    if status == Status.E_UNSUPPORTED:
        return UnsupportedError(sentence, status)
    if status == Status.E_MISMATCH:
        return MismatchError(sentence, status)
    if 1 <= status < 20:
        return CallerError(sentence, status)
    return RunError(sentence, status)


# --- structs ------------------------------------------------------------------------------------------------------------
class _Versioned(ctypes.Structure):
    """A struct of mok.h that begins with its size and version: made with both filled in and all else zero."""

    def __init__(self, **fields):
        super().__init__(**fields)
        self.struct_size = ctypes.sizeof(type(self))
        self.api_version = API_VERSION


_HEAD = [("struct_size", c_uint32), ("api_version", c_uint32)]
_ENUM = ctypes.c_int  # every enum of mok.h has values that fit an int


def _fields(kind, names: str):
    return [(name, kind) for name in names.split()]


class Config(_Versioned):
    _fields_ = (
        _HEAD
        + _fields(c_int64, "hidden intermediate shared_intermediate routed_hidden num_experts topk max_tokens")
        + _fields(_ENUM, "dtype router_dtype activation")
        + [("swiglu_limit", c_float)]
        + _fields(_ENUM, "gate_up weight_layout")
        + _fields(c_bool, "shared_gate expert_bias mx_wgrad_bf16")
        + _fields(c_int64, "ring_rows minibatch_rows minibatch_rows_bwd")
        + [("save", _ENUM), ("save_rows", c_int64), ("save_x", c_bool)]
        + _fields(c_int32, "comm_sms comm_sms_bwd reserve_sms")
        + [("backend", _ENUM), ("cpu_threads", c_int32), ("timeout_ms", c_int64), ("mx_wide_given", c_bool), ("yield_us", c_int32)]
    )


class BufferInfo(ctypes.Structure):
    _fields_ = [("name", c_char_p), ("kind", _ENUM), ("offset", c_int64), ("bytes", c_int64)]


class PassPlan(ctypes.Structure):
    _fields_ = [("two_wave_rows", c_double)] + _fields(c_int64, "minibatch_rows narrowest_gemm") + _fields(c_double, "flops link_bytes_in link_bytes_out")


class Plan(_Versioned):
    _fields_ = (
        _HEAD
        + _fields(c_int64, "experts_first experts_count balanced_rows capacity_rows row_tile ring_rows saved_rows smallest_ring_rows")
        + _fields(c_int64, "heap_bytes local_bytes schedule_bytes context_bytes")
        + _fields(PassPlan, "forward backward")
        + [("wide_bytes", c_int64)]
    )


ALL_GATHER = ctypes.CFUNCTYPE(ctypes.c_int, c_void_p, c_void_p, c_void_p, c_size_t)
HEAP_ALLOC = ctypes.CFUNCTYPE(ctypes.c_int, c_void_p, c_size_t, POINTER(c_void_p))
HEAP_FREE = ctypes.CFUNCTYPE(ctypes.c_int, c_void_p, c_void_p)


class Provider(_Versioned):
    _fields_ = _HEAD + [("user", c_void_p), ("all_gather", ALL_GATHER), ("heap_alloc", HEAP_ALLOC), ("heap_free", HEAP_FREE)]


class Bootstrap(_Versioned):
    _fields_ = _HEAD + [("user", c_void_p), ("all_gather", ALL_GATHER), ("timeout_ms", c_int64), ("set_device", c_bool), ("device", c_int32)]


class Weight(ctypes.Structure):
    _fields_ = _fields(c_void_p, "packed experts scales transposed transposed_scales")


WEIGHT_NAMES = ("gate", "up", "down", "shared_gate", "shared_up", "shared_down")


class Weights(ctypes.Structure):
    _fields_ = [(name, Weight) for name in WEIGHT_NAMES] + [("shared_output_gate", c_void_p)]


class Grad(ctypes.Structure):
    _fields_ = [("packed", c_void_p), ("experts", c_void_p), ("dtype", _ENUM), ("accumulate", c_bool)]


class Grads(ctypes.Structure):
    _fields_ = [(name, Grad) for name in WEIGHT_NAMES] + [("shared_output_gate", Grad), ("ready", c_void_p), ("ready_value", c_uint32)]


class ScheduleArgs(_Versioned):
    _fields_ = _HEAD + [("layer", c_uint64), ("num_tokens", c_int64)] + _fields(
        c_void_p, "expert_ids schedule tokens_per_expert_local tokens_per_expert_global"
    )


class ForwardArgs(_Versioned):
    _fields_ = (
        _HEAD
        + [("layer", c_uint64), ("num_tokens", c_int64)]
        + _fields(c_void_p, "schedule x router_weights")
        + [("weights", Weights)]
        + _fields(c_void_p, "context out wide")
    )


class BackwardArgs(_Versioned):
    _fields_ = (
        _HEAD
        + [("layer", c_uint64), ("num_tokens", c_int64)]
        + _fields(c_void_p, "schedule context dout x router_weights")
        + [("weights", Weights), ("parts", _ENUM)]
        + _fields(c_void_p, "dx drouter_weights")
        + [("grads", Grads)]
        + _fields(c_void_p, "wide wide_dgrad")
    )


class Stats(_Versioned):
    _fields_ = _HEAD + _fields(
        c_int64,
        "schedules forwards recomputes backwards rows rows_pulled rows_pulled_peer rows_copied rows_replayed rows_padding ring_rotations "
        "wgrad_continued bytes_pulled_peer bytes_pushed_peer mx_not_finite",
    )


class ScheduleInfo(_Versioned):
    _fields_ = _HEAD + _fields(
        c_int64,
        "tokens_global rows table_rows rows_copied_fwd rows_copied_bwd rows_pulled_peer_fwd rows_pulled_peer_bwd wgrad_pieces "
        "wgrad_continued bytes_pulled_peer_fwd bytes_pushed_peer_fwd bytes_pulled_peer_bwd bytes_pushed_peer_bwd",
    )


class TraceEvent(ctypes.Structure):
    _fields_ = _fields(c_uint64, "begin_ns end_ns link_bytes") + _fields(c_int32, "rank track lane sm kind tile part shared")


class TraceClock(ctypes.Structure):
    _fields_ = _fields(c_int32, "rank barriers") + _fields(c_int64, "offset_ns accuracy_ns")


class Finding(ctypes.Structure):
    _fields_ = [("check", c_char * 24), ("state", _ENUM), ("detail", c_char * 480), ("advice", c_char * 320)]


class MxQuantiseArgs(_Versioned):
    _fields_ = (
        _HEAD + [("backend", _ENUM)] + _fields(c_int64, "count rows cols") + _fields(c_void_p, "source data scales transposed transposed_scales not_finite")
    )


class MxWidenArgs(_Versioned):
    _fields_ = _HEAD + [("weights", Weights)] + _fields(c_void_p, "wide wide_dgrad")


class BackendInfo(_Versioned):
    _fields_ = _HEAD + [("id", _ENUM), ("name", c_char * 32), ("usable", c_bool), ("detail", c_char * 480), ("num_devices", c_int32)]


# Enum values by the words that the Python interface uses.
BACKEND = {"auto": 0, "cpu": 1, "cuda": 2}
DTYPE_AUTO, BF16, FP32, MXFP8 = 0, 1, 2, 3
GATE_UP = {"separate": 0, "combined": 1, "interleaved": 2}
WEIGHT_LAYOUT = {"nk": 0, "kn": 1}
SAVE = {"auto": 0, "none": 1, "ring": 2, "all": 3}
SAVE_ROWS = 4
CALL_SCHEDULE, CALL_FORWARD, CALL_RECOMPUTE, CALL_BACKWARD = 1, 2, 3, 4
BACKWARD_ALL, BACKWARD_DATA, BACKWARD_WEIGHTS = 0, 1, 2
MEM_HEAP, MEM_LOCAL, MEM_SCHEDULE, MEM_CONTEXT, MEM_WEIGHTS = 0, 1, 2, 3, 4

# name -> (result, arguments); opaque handles are void pointers.
_FUNCTIONS = {
    "mok_status_name": (c_char_p, [_ENUM]),
    "mok_status_text": (c_char_p, [_ENUM]),
    "mok_last_error": (c_char_p, []),
    "mok_version": (c_char_p, []),
    "mok_api_version": (c_uint32, []),
    "mok_expert_range": (_ENUM, [c_int64, c_int32, c_int32, POINTER(c_int64), POINTER(c_int64)]),
    "mok_timeout": (_ENUM, [c_int64, POINTER(c_int64)]),
    "mok_plan_query": (_ENUM, [POINTER(Config), c_int32, c_int32, c_int32, c_int32, c_int32, POINTER(Plan), POINTER(BufferInfo), POINTER(c_int32)]),
    "mok_group_create_local": (_ENUM, [c_int32, POINTER(c_int32), POINTER(c_void_p)]),
    "mok_group_create": (_ENUM, [POINTER(Provider), c_int32, c_int32, POINTER(c_void_p)]),
    "mok_group_create_processes": (_ENUM, [POINTER(Bootstrap), c_int32, c_int32, POINTER(c_void_p)]),
    "mok_group_destroy": (None, [c_void_p]),
    "mok_group_rank": (c_int32, [c_void_p]),
    "mok_group_size": (c_int32, [c_void_p]),
    "mok_workspace_create": (_ENUM, [c_void_p, POINTER(Config), POINTER(c_void_p)]),
    "mok_workspace_destroy": (None, [c_void_p]),
    "mok_workspace_config": (_ENUM, [c_void_p, POINTER(Config)]),
    "mok_workspace_plan": (_ENUM, [c_void_p, POINTER(Plan)]),
    "mok_schedule": (_ENUM, [c_void_p, POINTER(ScheduleArgs), c_void_p]),
    "mok_forward": (_ENUM, [c_void_p, POINTER(ForwardArgs), c_void_p]),
    "mok_recompute": (_ENUM, [c_void_p, POINTER(ForwardArgs), c_void_p]),
    "mok_backward": (_ENUM, [c_void_p, POINTER(BackwardArgs), c_void_p]),
    "mok_refuse": (_ENUM, [c_void_p, _ENUM, c_uint64, c_char_p, c_void_p]),
    "mok_memory_alloc": (_ENUM, [c_void_p, c_size_t, POINTER(c_void_p)]),
    "mok_memory_free": (None, [c_void_p, c_void_p]),
    "mok_memory_copy": (_ENUM, [c_void_p, c_void_p, c_void_p, c_size_t]),
    "mok_wait": (_ENUM, [c_void_p]),
    "mok_poll": (_ENUM, [c_void_p]),
    "mok_get_stats": (_ENUM, [c_void_p, POINTER(Stats)]),
    "mok_schedule_query": (_ENUM, [c_void_p, c_void_p, POINTER(ScheduleInfo)]),
    "mok_trace_start": (_ENUM, [c_void_p, c_int64]),
    "mok_trace_stop": (_ENUM, [c_void_p]),
    "mok_trace_read": (_ENUM, [c_void_p, POINTER(TraceEvent), POINTER(c_int64), POINTER(c_int64)]),
    "mok_trace_save": (_ENUM, [POINTER(TraceEvent), c_int64, _ENUM, c_char_p]),
    "mok_trace_align": (_ENUM, [POINTER(TraceEvent), c_int64, POINTER(TraceClock), POINTER(c_int32)]),
    "mok_trace_kind_name": (c_char_p, [c_int32]),
    "mok_trace_kind_group": (c_char_p, [c_int32]),
    "mok_doctor": (_ENUM, [POINTER(Finding), POINTER(c_int32)]),
    "mok_mx_quantise": (_ENUM, [POINTER(MxQuantiseArgs), c_void_p]),
    "mok_mx_widen": (_ENUM, [c_void_p, POINTER(MxWidenArgs), c_void_p]),
    "mok_mx_scale_bytes": (c_int64, [c_int64, c_int64]),
    "mok_set_log": (None, [c_void_p, c_void_p]),
    "mok_backend_query": (_ENUM, [c_int32, POINTER(BackendInfo)]),
}


# --- the library --------------------------------------------------------------------------------------------------------
def library_candidates() -> list[Path]:
    """Where libmok.so may be, first to last: MOK_LIBRARY, beside this file (where installing puts it), a build folder of the source tree."""
    if os.environ.get("MOK_LIBRARY"):
        return [Path(os.environ["MOK_LIBRARY"])]
    here = Path(__file__).resolve().parent
    return [here / "libmok.so", here.parent.parent / "build" / "libmok.so", here.parent.parent / "build-py" / "libmok.so"]


def _open() -> ctypes.CDLL:
    candidates = library_candidates()
    path = next((p for p in candidates if p.exists()), None)
    if path is None:
        raise ImportError("libmok.so was not found; looked at " + ", ".join(map(str, candidates)) + ". Run `pip install .`, or `make` and set MOK_LIBRARY.")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(f"{path} could not be loaded: {error}") from None
    missing = [name for name in _FUNCTIONS if not hasattr(library, name)]
    if missing:
        raise ImportError(f"{path} has no {', '.join(missing)}: it is of another version than this package")
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    if library.mok_api_version() < API_VERSION:
        raise ImportError(f"{path} knows version {library.mok_api_version()} of the interface, this package needs {API_VERSION}")
    library.path = path
    return library


_library = None
_lock = threading.Lock()


def library() -> ctypes.CDLL:
    """libmok.so, opened once."""
    global _library
    if _library is None:
        with _lock:
            if _library is None:
                _library = _open()
    return _library


def check(status: int) -> None:
    """Raises what a failed call of this thread stands for."""
    if status:
        raise exception_for(status, library().mok_last_error().decode(errors="replace"))


def version() -> str:
    return library().mok_version().decode()


def expert_range(num_experts: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """First expert of `rank`, and how many it has."""
    first, count = c_int64(), c_int64()
    check(library().mok_expert_range(num_experts, num_ranks, rank, byref(first), byref(count)))
    return first.value, count.value


def timeout(seconds: float | None) -> float:
    """How many seconds to wait for another rank: as said, or where nobody says (None) what the library chooses."""
    if seconds is not None and not isinstance(seconds, (int, float)):
        raise TypeError(f"timeout is {seconds!r}: it must be a number of seconds, or None")
    if seconds is not None and not seconds > 0:
        raise ValueError(f"timeout is {seconds} s: it must be above 0")
    ms = c_int64()
    check(library().mok_timeout(0 if seconds is None else max(1, int(1000 * min(seconds, 1e15))), byref(ms)))
    return ms.value / 1000


def plan(config: Config, num_ranks: int = 1, rank: int = 0, num_sms: int = 0) -> Plan:
    """What a configuration will cost; no group and no GPU needed."""
    result = Plan()
    check(library().mok_plan_query(byref(config), num_ranks, rank, num_sms, 0, 0, byref(result), None, None))
    return result


def buffers(config: Config, num_ranks: int = 1, rank: int = 0) -> list[BufferInfo]:
    """The memory map of `plan`, buffer by buffer."""
    result, count = Plan(), c_int32(0)
    lib = library()
    check(lib.mok_plan_query(byref(config), num_ranks, rank, 0, 0, 0, byref(result), None, byref(count)))
    infos = (BufferInfo * count.value)()
    check(lib.mok_plan_query(byref(config), num_ranks, rank, 0, 0, 0, byref(result), infos, byref(count)))
    return list(infos)


def backends() -> dict[str, BackendInfo]:
    """What the library can run here, by name."""
    found, index = {}, 0
    while True:
        info = BackendInfo()
        if library().mok_backend_query(index, byref(info)):
            return found
        found[info.name.decode()] = info
        index += 1
