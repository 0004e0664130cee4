"""The stateless operations of the published MoK, by its names, in plain PyTorch: pieces to test and build with. The passes themselves are in
mok.functional: here, dispatch, expert products and combine are one kernel with the barriers in it, and have no form without a workspace."""

from __future__ import annotations

import torch

from . import _mx
from ._row_table import RowTable, row_table

__all__ = ["all_gather_top_experts", "barrier_all", "bwd_epilogue", "dispatch_mlp_swiglu_combine_bwd_bf16", "dispatch_mlp_swiglu_combine_bwd_mxfp8",
           "dispatch_mlp_swiglu_combine_fwd_bf16", "dispatch_mlp_swiglu_combine_fwd_mxfp8", "fwd_epilogue", "mxfp8_quantize", "recompute_forward_context_bf16",
           "recompute_forward_context_mxfp8", "schedule"]

BLOCK = 32
E4M3_MAX = 448.0
MIN_EXPONENT, MAX_EXPONENT = -39, 119


def _tensor(name: str, value, dtype, dims: int) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}: it must be a tensor")
    if value.dtype != dtype or value.dim() != dims:
        raise ValueError(f"{name} is {value.dtype} with {value.dim()} sizes: it must be {dtype} with {dims}")


def _group_of(ranks: int, group):
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(f"{ranks} ranks, but torch.distributed is not initialised")
    if dist.get_world_size(group) != ranks:
        raise ValueError(f"the buffer is for {ranks} ranks, the group has {dist.get_world_size(group)}: give group=")
    return group


def all_gather_top_experts(top_experts: torch.Tensor, buffer: torch.Tensor, multicast_ptr: int = 0, rank: int = 0, chunk_bytes: int = 2048, *, group=None) -> None:
    """top_experts int32 [T, K] of every rank into buffer int32 [P, T, K]. No multicast memory is needed."""
    _tensor("top_experts", top_experts, torch.int32, 2)
    _tensor("buffer", buffer, torch.int32, 3)
    if buffer.shape[1:] != top_experts.shape:
        raise ValueError(f"buffer is {list(buffer.shape)}, top_experts {list(top_experts.shape)}")
    if isinstance(chunk_bytes, bool) or not isinstance(chunk_bytes, int) or chunk_bytes <= 0 or chunk_bytes % 16:
        raise ValueError(f"chunk_bytes is {chunk_bytes!r}: it must be a positive multiple of 16")
    if buffer.shape[0] == 1:
        buffer[0].copy_(top_experts)
        return
    import torch.distributed as dist

    dist.all_gather(list(buffer.unbind(0)), top_experts.contiguous(), group=_group_of(buffer.shape[0], group))


def barrier_all(buffer: torch.Tensor, pointers: list[int], multicast_ptr: int = 0, target: torch.Tensor | None = None, *, group=None) -> None:
    """All ranks meet; nothing for one."""
    if not isinstance(pointers, list) or any(isinstance(p, bool) or not isinstance(p, int) or p <= 0 for p in pointers):
        raise TypeError("pointers must be a list of positive numbers, one for each rank")
    if len(pointers) > 1:
        import torch.distributed as dist

        dist.barrier(_group_of(len(pointers), group))


def schedule(topk_all: torch.Tensor, num_local_experts: int, capacity: int, rank: int) -> RowTable:
    """topk_all int32 [P, T, K] -> peer rank and peer token of each of `capacity` rows (-1: padding), rows in all, rows per expert; rows in this
    library's order (docs/contract.md). num_local_experts on every rank."""
    _tensor("topk_all", topk_all, torch.int32, 3)
    ranks, tokens, topk = topk_all.shape
    if capacity <= 0 or capacity % 256 or capacity < tokens * topk:
        raise ValueError(f"capacity is {capacity}: it must be a positive multiple of 256, and at least T * K, which is {tokens * topk}")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank is {rank}: it must be from 0 to {ranks - 1}")
    table = row_table(list(topk_all.unbind(0)), num_local_experts * ranks, rank)
    rows = len(table.rank)
    if rows > capacity:
        raise ValueError(f"the routing gives rank {rank} {rows} rows, padding included: more than capacity, {capacity}")
    pad = torch.nn.functional.pad
    return RowTable(pad(table.rank, (0, capacity - rows), value=-1), pad(table.slot, (0, capacity - rows)), table.num_rows, table.rows_per_expert)


def fwd_epilogue(y_shared: torch.Tensor | None, combine_buffer: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """y_shared [T, H] + sum over k of topk_weights[t, k] * combine_buffer[t * K + k]: fp32, k ascending, one rounding."""
    tokens, topk = topk_weights.shape
    rows = combine_buffer.view(tokens, topk, -1)
    total = torch.zeros_like(rows[:, 0], dtype=torch.float32) if y_shared is None else y_shared.float()
    for k in range(topk):
        total = torch.addcmul(total, topk_weights[:, k : k + 1].float(), rows[:, k].float())
    return total.to(torch.bfloat16)


def bwd_epilogue(d_x_shared: torch.Tensor | None, d_x_routed_buffer: torch.Tensor, topk: int | None = None) -> torch.Tensor:
    """d_x_shared [T, H] + sum over k of d_x_routed_buffer [T * K, H]: fp32, k ascending, one rounding."""
    if d_x_shared is None and topk is None:
        raise ValueError("without d_x_shared, topk must be given")
    tokens = d_x_routed_buffer.shape[0] // topk if d_x_shared is None else d_x_shared.shape[0]
    rows = d_x_routed_buffer.view(tokens, -1, d_x_routed_buffer.shape[-1])
    total = torch.zeros_like(rows[:, 0], dtype=torch.float32) if d_x_shared is None else d_x_shared.float()
    for k in range(rows.shape[1]):
        total = total + rows[:, k].float()
    return total.to(torch.bfloat16)


def _quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[M, N] in blocks of 32 along N -> e4m3 [M, N] and scale bytes [M, N / 32]. NaN and infinite elements become NaN; an all-zero block has the
    smallest scale."""
    blocks = x.float().view(x.shape[0], -1, BLOCK)
    largest = torch.where(blocks.isfinite(), blocks.abs(), 0.0).amax(-1)
    mantissa, exponent = torch.frexp(largest / E4M3_MAX)  # in [0.5, 1): the next power of two up is 2^exponent, or one less if it is one
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    exponent = torch.where(largest == 0, MIN_EXPONENT, exponent).clamp(MIN_EXPONENT, MAX_EXPONENT)
    scaled = torch.ldexp(blocks, -exponent.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
    scaled = torch.where(blocks.isfinite(), scaled, float("nan"))
    return scaled.view(x.shape).to(torch.float8_e4m3fn), (exponent + 127).to(torch.uint8)


def mxfp8_quantize(x: torch.Tensor, return_normal: bool = True, return_transposed: bool = False):
    """x bf16 [M, N] or [E, M, N], M and N multiples of 32 -> data and scales along N, data and scales of the transpose along M; None for what is not asked
    for. Scales are [E * ceil(M / 128), ceil(N / 128), 32, 16]. By the library on the CPU and on NVIDIA GPUs, in PyTorch elsewhere: the same bits."""
    for name, flag in (("return_normal", return_normal), ("return_transposed", return_transposed)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} is {flag!r}: it must be True or False")
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is a {type(x).__name__}: it must be a tensor")
    if x.dtype != torch.bfloat16 or x.dim() not in (2, 3) or x.shape[-1] % BLOCK or x.shape[-2] % BLOCK:
        raise ValueError(f"x is {x.dtype} {list(x.shape)}: it must be bfloat16 [M, N] or [E, M, N], M and N multiples of {BLOCK}")
    if x.device.type in ("cpu", "cuda"):
        return _mx.quantise(x, return_normal, return_transposed).tensors()
    return _quantize_in_torch(x, return_normal, return_transposed)


def _quantize_in_torch(x: torch.Tensor, return_normal: bool, return_transposed: bool):
    result = []
    for wanted, source in ((return_normal, x), (return_transposed, x.transpose(-1, -2))):
        if not wanted:
            result += [None, None]
            continue
        data, scales = _quantize_rows(source.reshape(-1, source.shape[-1]))
        scales = torch.cat([_mx.tile_scales(each) for each in scales.view(-1, source.shape[-2], scales.shape[-1])])
        result += [data.view(source.shape), scales]
    return tuple(result)


def _fused(name: str, instead: str):
    def call(*arguments, **options):
        raise NotImplementedError(f"mok.ops.{name}: the pass is one kernel with its barriers and its reduce, and needs a workspace: call mok.functional.{instead}")

    call.__name__ = name
    return call


dispatch_mlp_swiglu_combine_fwd_bf16 = _fused("dispatch_mlp_swiglu_combine_fwd_bf16", "forward")
dispatch_mlp_swiglu_combine_bwd_bf16 = _fused("dispatch_mlp_swiglu_combine_bwd_bf16", "backward")
recompute_forward_context_bf16 = _fused("recompute_forward_context_bf16", "recompute_forward_context")
dispatch_mlp_swiglu_combine_fwd_mxfp8 = _fused("dispatch_mlp_swiglu_combine_fwd_mxfp8", "forward")
dispatch_mlp_swiglu_combine_bwd_mxfp8 = _fused("dispatch_mlp_swiglu_combine_bwd_mxfp8", "backward")
recompute_forward_context_mxfp8 = _fused("recompute_forward_context_mxfp8", "recompute_forward_context")
