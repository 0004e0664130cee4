"""Sinks: where weight gradients are added up by the kernel itself (`main_grad` of each parameter, fp32 or bf16), instead of being returned.

A sink is known by a word, "" for none, so that it fits through an operator. It holds its parameters weakly.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Sequence

import torch

_sinks: "weakref.WeakValueDictionary[str, Sink]" = weakref.WeakValueDictionary()
_numbers = itertools.count()


class Sink:
    """parameters: for each weight's name its tensors, as they are passed to mok.moe; those without main_grad get ordinary gradients."""

    def __init__(self, parameters: dict[str, Sequence[torch.Tensor]]):
        self.handle = f"sink{next(_numbers)}"
        self.parameters = {name: [weakref.ref(p) for p in tensors] for name, tensors in parameters.items()}
        self.shape = {name: [has_main_grad(p) for p in tensors] for name, tensors in parameters.items()}
        for name, tensors in parameters.items():
            for p in tensors:
                if has_main_grad(p):
                    _check(name, p)
            if 0 < sum(self.shape[name]) < len(tensors):
                raise ValueError(f"some experts of {name} have a main_grad and some have none: give it to all or to none")
        _sinks[self.handle] = self


def has_main_grad(parameter) -> bool:
    return getattr(parameter, "main_grad", None) is not None and parameter.requires_grad


def _check(name: str, parameter) -> None:
    grad = parameter.main_grad
    if grad.shape != parameter.shape or grad.device != parameter.device:
        raise ValueError(f"main_grad of {name} is {list(grad.shape)} on {grad.device}, its parameter {list(parameter.shape)} on {parameter.device}")
    if grad.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"main_grad of {name} is {grad.dtype}: it must be float32 or bfloat16")
    if not grad.is_contiguous():
        raise ValueError(f"main_grad of {name} is not contiguous")


def _find(handle: str) -> Sink:
    sink = _sinks.get(handle)
    if sink is None:
        raise RuntimeError(f"the parameters of {handle} are gone: the layer was deleted between its forward and its backward")
    return sink


def targets(handle: str, name: str, count: int) -> list:
    """main_grad of each tensor of a weight, None where there is none."""
    if not handle:
        return [None] * count
    sink, result = _find(handle), []
    for reference, has in zip(sink.parameters.get(name, [None] * count), sink.shape.get(name, [False] * count)):
        parameter = reference() if has else None
        if has and parameter is None:
            raise RuntimeError(f"a parameter of {name} is gone: the layer was deleted between its forward and its backward")
        if has:
            _check(name, parameter)
        result.append(parameter.main_grad if has else None)
    return result


def sunk(handle: str, counts: list[int], has_shared: list[bool]) -> list[bool]:
    """For each weight tensor in order: does its gradient go to a sink?"""
    names = [*zip(("gate", "up", "down"), counts), *zip(("shared_gate", "shared_up", "shared_down", "shared_output_gate"), map(int, has_shared))]
    if not handle:
        return [False] * sum(n for _, n in names)
    shape = _find(handle).shape
    return [s for name, n in names for s in shape.get(name, [False] * n)[:n]]


def filled(handle: str) -> None:
    """Tells the optimizer's side, as Megatron's gradient buffers want it told."""
    if not handle:
        return
    sink = _find(handle)
    for name, references in sink.parameters.items():
        for reference, has in zip(references, sink.shape[name]):
            parameter = reference() if has else None
            if parameter is not None and hasattr(parameter, "grad_added_to_main_grad"):
                parameter.grad_added_to_main_grad = True


def dummy(handle: str, tensor: torch.Tensor):
    """What autograd gets for a gradient that is in main_grad already: nothing; or, for frameworks that wait for a hook on the parameter, a
    tensor with no meaning."""
    sink = _find(handle)
    for references in sink.parameters.values():
        for reference in references:
            parameter = reference()
            if parameter is not None and hasattr(parameter, "grad_added_to_main_grad"):
                return torch.zeros_like(tensor)
    return None
