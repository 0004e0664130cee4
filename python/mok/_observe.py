"""Looking at what runs: traces of a layer's calls, and what stands in the way on a machine."""

from __future__ import annotations

import tempfile
from ctypes import byref, c_int32, c_int64, sizeof
from dataclasses import dataclass
from pathlib import Path

from . import _library as lib

_FORMATS = {".json": 1, ".svg": 2, ".txt": 3}


class trace:
    """Who did what when while the block ran, on this rank.

        with mok.trace(layer) as seen:
            layer(x)
        seen.save("step.svg")      # a picture; .json is for ui.perfetto.dev, .txt a summary
        print(seen)

    `layer` is a mok.MoE or a mok.Engine whose workspace is open: run it once before, or call its prepare(). Each lane (a role of a CTA, or a worker)
    keeps its youngest `events_per_lane` events. Graphs captured earlier are not traced. Not collective; leaving the block waits for the work.
    seen.together() brings in the other ranks' events.
    """

    def __init__(self, layer, events_per_lane: int = 0):
        self._engine = getattr(layer, "engine", layer)
        self._events_per_lane = events_per_lane
        self.events = (lib.TraceEvent * 0)()
        self.clocks = (lib.TraceClock * 0)()
        self.lost = 0

    def __enter__(self) -> trace:
        self._workspaces = list(self._engine._open.values())
        if not self._workspaces:
            raise ValueError("the layer has no workspace yet: run it once before, or call its prepare()")
        for workspace in self._workspaces:
            lib.check(lib.library().mok_trace_start(workspace.handle, self._events_per_lane))
        return self

    def __exit__(self, *error) -> None:
        found = []
        for workspace in self._workspaces:
            count, lost = c_int64(), c_int64()
            lib.check(lib.library().mok_trace_read(workspace.handle, None, byref(count), byref(lost)))
            events = (lib.TraceEvent * count.value)()
            lib.check(lib.library().mok_trace_read(workspace.handle, events, byref(count), None))
            lib.check(lib.library().mok_trace_stop(workspace.handle))
            found += events
            self.lost += lost.value
        self.events = (lib.TraceEvent * len(found))(*found)

    def together(self, process_group=None) -> trace:
        """The events of all ranks of a process group. Collective. GPUs have clocks of their own: all are moved to that of the first, as far as barriers tell, and
        `clocks` says for each rank how far it was ahead, and how well that is known (mok_trace_clock in mok.h)."""
        import torch.distributed as dist

        parts = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(parts, bytes(self.events), group=process_group)
        everything = b"".join(parts)
        count = len(everything) // sizeof(lib.TraceEvent)
        self.events = (lib.TraceEvent * count).from_buffer_copy(everything)
        if self._engine.device.type == "cpu":
            return self
        ranks = c_int32()
        lib.check(lib.library().mok_trace_align(self.events, count, None, byref(ranks)))
        self.clocks = (lib.TraceClock * ranks.value)()
        lib.check(lib.library().mok_trace_align(self.events, count, self.clocks, byref(ranks)))
        return self

    def kinds(self) -> dict[str, int]:
        """Events of each kind, by name."""
        counts: dict[str, int] = {}
        for event in self.events:
            name = lib.library().mok_trace_kind_name(event.kind).decode()
            counts[name] = counts.get(name, 0) + 1
        return counts

    def save(self, path) -> None:
        """Writes a file; its ending (.json, .svg or .txt) says what."""
        suffix = Path(path).suffix
        if suffix not in _FORMATS:
            raise ValueError(f"{path} ends with {suffix!r}: it must be one of {', '.join(_FORMATS)}")
        lib.check(lib.library().mok_trace_save(self.events, len(self.events), _FORMATS[suffix], str(path).encode()))

    def __str__(self) -> str:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.txt"
            self.save(path)
            return path.read_text()


@dataclass(frozen=True)
class Finding:
    """One thing that doctor() has looked at. state: "good", "skipped", "warning" or "bad"."""

    check: str
    state: str
    detail: str
    advice: str


def doctor() -> list[Finding]:
    """What ranks need on this machine, whether it is there, and what to change. The last finding is the verdict."""
    count = c_int32()
    lib.check(lib.library().mok_doctor(None, byref(count)))
    findings = (lib.Finding * count.value)()
    lib.check(lib.library().mok_doctor(findings, byref(count)))
    states = ("good", "skipped", "warning", "bad")
    return [Finding(f.check.decode(), states[f.state], f.detail.decode(errors="replace"), f.advice.decode(errors="replace")) for f in findings]
