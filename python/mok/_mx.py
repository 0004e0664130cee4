"""MXFP8 weights: quantised by the library, and kept as long as the weight is the same.

A microbatch loop and recompute read the same weights again and again; they are quantised once, when a pass first needs that quantisation; where the
chip's products read bf16 (Hopper) they are widened once, and only that is kept. A kept one is used only if PyTorch's version counter of the weight says that nobody has written to it since, and all are forgotten when a torch optimizer has made
its step (frameworks write through `.data`, which the counter does not see). Who writes in yet another way says so: mok.weights_changed().
"""

from __future__ import annotations

import dataclasses
import weakref
from ctypes import byref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import _library as lib

BLOCK, TILE = 32, 128


@dataclasses.dataclass
class Quantised:
    """A weight [El, rows, cols]: data e4m3 and scales with blocks along cols; transposed [El, cols, rows] with blocks along rows. None: not at hand."""

    data: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    transposed: torch.Tensor | None = None
    transposed_scales: torch.Tensor | None = None

    def tensors(self) -> tuple:
        return self.data, self.scales, self.transposed, self.transposed_scales


def scales_shape(count: int, rows: int, cols: int) -> tuple[int, int, int, int]:
    """Of the published format: tiles of 128 x 128, experts flattened into the first axis."""
    return count * -(-rows // TILE), -(-cols // TILE), 32, 16


def quantise(weight: torch.Tensor, normal: bool = True, transposed: bool = False) -> Quantised:
    """bf16 [rows, cols] or [El, rows, cols], rows and cols multiples of 32. Quantised by the library, on the current stream."""
    source = weight.detach().contiguous()
    *counts, rows, cols = source.shape
    count, q = (counts[0] if counts else 1), Quantised()
    args = lib.MxQuantiseArgs(backend=lib.BACKEND[source.device.type], count=count, rows=rows, cols=cols, source=source.data_ptr())
    if normal:
        q.data = torch.empty(source.shape, dtype=torch.float8_e4m3fn, device=source.device)
        q.scales = torch.empty(scales_shape(count, rows, cols), dtype=torch.uint8, device=source.device)
        args.data, args.scales = q.data.data_ptr(), q.scales.data_ptr()
    if transposed:
        q.transposed = torch.empty((*counts, cols, rows), dtype=torch.float8_e4m3fn, device=source.device)
        q.transposed_scales = torch.empty(scales_shape(count, cols, rows), dtype=torch.uint8, device=source.device)
        args.transposed, args.transposed_scales = q.transposed.data_ptr(), q.transposed_scales.data_ptr()
    stream = torch.cuda.current_stream(source.device).cuda_stream if source.device.type == "cuda" else None
    lib.check(lib.library().mok_mx_quantise(byref(args), stream))
    return q


# --- the cache ----------------------------------------------------------------------------------------------------------
class _Made:
    """Tensors made by work on a stream, which other streams must wait for before they use them."""

    def __init__(self, *tensors: torch.Tensor):
        self.tensors = tensors
        self.stream = torch.cuda.current_stream(tensors[0].device) if tensors[0].is_cuda else None
        self.event = self.stream.record_event() if self.stream else None

    def use(self) -> None:
        if self.stream is None:
            return
        now = torch.cuda.current_stream(self.stream.device)
        if now != self.stream:
            now.wait_event(self.event)
            for tensor in self.tensors:
                tensor.record_stream(now)


@dataclasses.dataclass
class _Kept:
    owner: weakref.ref  # the tensor that was quantised: while it lives, its memory is nobody else's
    version: int
    quantised: Quantised
    made: list[_Made] = dataclasses.field(default_factory=list)


_kept: dict[tuple, _Kept] = {}
made = 0  # quantisations so far, for tests and statistics


def cached(weight: torch.Tensor, normal: bool, transposed: bool) -> Quantised:
    """quantise(), or what it gave before for the same contents."""
    global made
    if weight.is_inference() or (weight.is_cuda and torch.cuda.is_current_stream_capturing()):  # no version counter; replayed with other contents
        made += 1
        return quantise(weight, normal, transposed)
    key = (weight.data_ptr(), tuple(weight.shape), weight.device)
    kept = _kept.get(key)
    owner = kept.owner() if kept else None
    if owner is None or owner.data_ptr() != key[0] or kept.version != weight._version or owner._version != weight._version:
        kept = _kept[key] = _Kept(weakref.ref(weight, lambda _: _forget(key)), weight._version, Quantised())
    q = kept.quantised
    for each in kept.made:
        each.use()
    normal, transposed = normal and q.data is None, transposed and q.transposed is None
    if normal or transposed:
        new = quantise(weight, normal, transposed)
        made += normal + transposed
        for name, tensor in vars(new).items():
            if tensor is not None:
                setattr(q, name, tensor)
        kept.made.append(_Made(*(t for t in new.tensors() if t is not None)))
    return q


def _forget(key: tuple) -> None:
    kept = _kept.get(key)
    if kept is not None and kept.owner() is None:
        del _kept[key]


# --- widened weights, where products read bf16 (Hopper) -----------------------------------------------------------------
@dataclasses.dataclass
class _KeptWide:
    owners: list[weakref.ref]  # of the tensors that were widened, in order
    addresses: list[int]
    versions: list[int]
    with_down: bool
    memory: torch.Tensor
    made: _Made

    def is_of(self, sources: list[torch.Tensor]) -> bool:
        """`sources` may leave out the down weight's, which come last."""
        owners = [owner() for owner in self.owners]
        return len(sources) <= len(owners) and all(
            owner is not None and address == source.data_ptr() == owner.data_ptr() and version == source._version == owner._version
            for owner, address, version, source in zip(owners, self.addresses, self.versions, sources)
        )


_wide: dict[tuple, _KeptWide] = {}


def _sources(weight, dgrad: bool) -> list[torch.Tensor]:
    """What the quantisation for the forward, or for dgrad, of a routed weight is made of; nothing if it is not at hand."""
    if weight is None or isinstance(weight, torch.Tensor):
        return [] if weight is None else [weight]
    tensors = list(weight.tensors()[2:] if dgrad else weight.tensors()[:2]) if isinstance(weight, Quantised) else list(weight)
    return [] if any(t is None for t in tensors) else tensors


def wide(workspace, weights, dgrad: bool) -> torch.Tensor:
    """One quantisation of the routed weights, widened (workspace.widen), or what was made before of the same contents. In a graph that is being captured
    it is always made: the graph will be replayed when weights have changed."""
    global made
    gate_up, down = _sources(weights.gate, dgrad) + _sources(weights.up, dgrad), _sources(weights.down, dgrad)
    sources = gate_up + down
    key = (workspace.wide_layout(), dgrad, *(t.data_ptr() for t in gate_up))
    keep = not any(t.is_inference() for t in sources) and not (workspace.device.type == "cuda" and torch.cuda.is_current_stream_capturing())
    kept = _wide.get(key) if keep else None
    if kept is not None and kept.with_down >= bool(down) and kept.is_of(sources):
        kept.made.use()
        return kept.memory
    memory = workspace.widen(weights, dgrad)
    made += sum(bool(_sources(w, dgrad)) for w in (weights.gate, weights.up, weights.down))
    if keep:
        owners, addresses = [weakref.ref(t, lambda _: _forget_wide(key)) for t in sources], [t.data_ptr() for t in sources]
        _wide[key] = _KeptWide(owners, addresses, [t._version for t in sources], bool(down), memory, _Made(memory))
    return memory


def _forget_wide(key: tuple) -> None:
    kept = _wide.get(key)
    if kept is not None and any(owner() is None for owner in kept.owners):
        del _wide[key]


def kept_bytes() -> int:
    """Of quantised and widened weights that are kept now."""
    tensors = [t for kept in _kept.values() for t in kept.quantised.tensors() if t is not None] + [kept.memory for kept in _wide.values()]
    return sum(t.numel() * t.element_size() for t in tensors)


def weights_changed(*weights: torch.Tensor) -> None:
    """MXFP8: these weights (none given: all) were written in a way that PyTorch's version counter does not see, such as through `.data` or by a kernel
    of one's own; they are quantised again when they are next used. In-place operations, load_state_dict and torch's optimizers need no call."""
    if not weights:
        _kept.clear()
        _wide.clear()
    for weight in weights:
        for key in [k for k in _kept if k[0] == weight.data_ptr()]:
            del _kept[key]
        for key in [k for k, kept in _wide.items() if weight.data_ptr() in kept.addresses]:
            del _wide[key]


register_optimizer_step_post_hook(lambda *_: weights_changed())


# --- the published tuples ---------------------------------------------------------------------------------------------------
def _check_pair(name: str, data, scales, size: tuple, device) -> tuple[torch.Tensor, torch.Tensor]:
    for tensor in (data, scales):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} has a {type(tensor).__name__}: an MXFP8 weight is a tuple of tensors")
    if data.dtype not in (torch.float8_e4m3fn, torch.uint8) or tuple(data.shape) != size or data.device != device or not data.is_contiguous():
        raise ValueError(f"{name}: data is {data.dtype} {list(data.shape)} on {data.device}: it must be contiguous float8_e4m3fn {list(size)} on {device}")
    wanted = scales_shape(*size)
    kinds = (torch.uint8, getattr(torch, "float8_e8m0fnu", torch.uint8))
    if scales.dtype not in kinds or tuple(scales.shape) != wanted or scales.device != device or not scales.is_contiguous():
        raise ValueError(f"{name}: scale is {scales.dtype} {list(scales.shape)} on {scales.device}: it must be contiguous uint8 {list(wanted)} on {device}")
    return data, scales


def from_tuple(name: str, weight: tuple, size: tuple, device, backward: bool) -> Quantised:
    """(data, scale); in the backward (data, scale, transposed data, transposed scale) of gate and up, and the transposed pair of down.
    size: [El, rows, cols] of the weight."""
    turned = (size[0], size[2], size[1])
    pairs = 2 if backward and not name.endswith("down") else 1
    if len(weight) != 2 * pairs:
        raise ValueError(f"{name} has {len(weight)} tensors: it must be " + ("(data, scale, transposed data, transposed scale)" if pairs == 2 else
                         "(transposed data, transposed scale)" if backward else "(data, scale)"))
    q = Quantised()
    if pairs == 2 or not backward:
        q.data, q.scales = _check_pair(name, *weight[:2], size, device)
    if backward:
        q.transposed, q.transposed_scales = _check_pair(name + ", transposed", *weight[-2:], turned, device)
    return q


def tile_scales(scales: torch.Tensor) -> torch.Tensor:
    """[rows, cols / 32] -> [ceil(rows / 128), ceil(cols / 128), 32, 16], filled up with the scale of zeros."""
    rows, blocks = scales.shape
    padded = torch.nn.functional.pad(scales, (0, -blocks % 4, 0, -rows % TILE), value=88)
    rows, blocks = padded.shape
    return padded.view(rows // TILE, 4, 32, blocks // 4, 4).permute(0, 3, 2, 1, 4).reshape(rows // TILE, blocks // 4, 32, 16).contiguous()


def split_rows(rows: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The library's own rows (columns elements, columns / 32 scales, padding), as data and scales of the published format."""
    data = rows[:, :columns].contiguous().view(torch.float8_e4m3fn)
    return data, tile_scales(rows[:, columns : columns + columns // BLOCK])
