"""Activation checkpointing runs a region twice; routing need not be. What was decided in the first run is kept with the region and given back in
the second.

A region of torch.utils.checkpoint is known by the frame object of its hooks (use_reentrant=False) or by the autograd node that
runs it (use_reentrant=True, and functions of other frameworks made the same way). Where no region can be told, the decision is taken again:
that costs a schedule, and nothing else.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, Callable, Hashable

import torch

_MAX_DEPTH = 400  # Python frames looked at


class _Decisions:
    """Of one region: for each key what was decided, in order, and how far each second run has come."""

    def __init__(self):
        self.made: dict[Hashable, list] = {}
        self.given: dict[tuple, int] = {}

    def give(self, key: Hashable, run: Any):
        """The next decision of this run, or None if the first run made no more."""
        made, place = self.made.get(key, ()), self.given.get((key, run), 0)
        if place >= len(made):
            return None
        self.given[key, run] = place + 1
        return made[place]


_of_frame: "weakref.WeakKeyDictionary[Any, _Decisions]" = weakref.WeakKeyDictionary()


def once(key: Hashable, decide: Callable[[], Any]):
    """decide(), or what it returned when this region of activation checkpointing ran first."""
    decisions, run = _region()
    if decisions is None:
        return decide()
    if run is not None:
        kept = decisions.give(key, run)
        if kept is not None:
            return kept
        return decide()
    result = decide()
    decisions.made.setdefault(key, []).append(result)
    return result


def _region() -> tuple[_Decisions | None, Any]:
    """The innermost region, and which second run this is: None in the first."""
    frame, run = _hook_frame()
    if frame is not None:
        return _of_frame.setdefault(frame, _Decisions()), run
    task = torch._C._current_graph_task_id()
    if task == -1 and torch.is_grad_enabled():
        return None, None
    node = _checkpoint_node("backward" if task != -1 else "forward")
    if node is None:
        return None, None
    decisions = getattr(node, "_mok_decisions", None)
    if decisions is None:
        if task != -1:
            return None, None
        decisions = node._mok_decisions = _Decisions()
    return decisions, (task if task != -1 else None)


def _hook_frame():
    """The frame of a region without reentry: its saved-tensor hooks have it in their closure. Second: which second run this is, None in the first."""
    try:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    except (AttributeError, TypeError):
        return None, None
    pack = hooks[0] if hooks else None
    for _ in range(4):  # the function itself, or what a decorator holds
        code, cells = getattr(pack, "__code__", None), getattr(pack, "__closure__", None)
        if code is None or not cells:
            return None, None
        held = {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells)}
        if hasattr(held.get("frame"), "weak_holders"):
            return held["frame"], None
        if callable(held.get("target_frame_ref")):
            return held["target_frame_ref"](), held.get("gid")
        pack = held.get("fn")
    return None, None


def _checkpoint_node(name: str):
    """The autograd node of the innermost checkpoint function that is running, found among the callers."""
    frame = sys._getframe(2)
    for _ in range(_MAX_DEPTH):
        if frame is None:
            return None
        if frame.f_code.co_name == name:
            values = frame.f_locals
            node = values.get("ctx")
            if node is not None and ("run_function" in values or hasattr(node, "run_function")):
                return node
        frame = frame.f_back
    return None
