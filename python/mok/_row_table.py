"""The row table of a rank: which token's row stands where. Computed from all ranks' routes by the rule of docs/contract.md, and read out of a schedule
made by the library, whose layout mok_plan_query tells."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from . import _library as lib

ROW_TILE = 128
SHARDS = 64
_ROW_FIELDS = 4  # a row is four int32: source rank, source slot, and two that only the passes need


class RowTable(NamedTuple):
    rank: torch.Tensor  # int32 [rows]: whose token, -1 for padding
    slot: torch.Tensor  # int32 [rows]: token * K + k there
    num_rows: torch.Tensor  # int32 [1], padding included
    rows_per_expert: torch.Tensor  # int32 [El], padding included


def row_table(expert_ids: list[torch.Tensor], num_experts: int, rank: int) -> RowTable:
    """expert_ids: of each rank [T, K]. Experts of a rank as the library divides them."""
    first, count = lib.expert_range(num_experts, len(expert_ids), rank)
    topk, device = expert_ids[0].shape[1], expert_ids[0].device
    ids = torch.cat(expert_ids).long()
    tokens = ids.shape[0]
    owner = torch.cat([torch.full((t.shape[0],), r, device=device) for r, t in enumerate(expert_ids)])
    local = torch.cat([torch.arange(t.shape[0], device=device) for t in expert_ids])
    shard = -(-tokens // SHARDS) or 1
    g = torch.arange(tokens, device=device)
    order = torch.argsort((g % shard) * (tokens + SHARDS) + g // shard, stable=True)
    ranks, slots, sizes = [], [], []
    for expert in range(first, first + count):
        hits = (ids[order] == expert).nonzero()  # by place in the order, then by k
        token = order[hits[:, 0]]
        padding = -len(token) % ROW_TILE
        ranks.append(torch.nn.functional.pad(owner[token], (0, padding), value=-1))
        slots.append(torch.nn.functional.pad(local[token] * topk + hits[:, 1], (0, padding)))
        sizes.append(len(token) + padding)
    empty = torch.empty(0, dtype=torch.int64, device=device)
    sizes = torch.tensor(sizes, dtype=torch.int32, device=device)
    return RowTable(torch.cat([*ranks, empty]).int(), torch.cat([*slots, empty]).int(), sizes.sum(dtype=torch.int32).reshape(1), sizes)


def read_table(engine, schedule: torch.Tensor) -> RowTable:
    """What is in a schedule of the library. Waits for the device."""
    engine.wait()
    config = dataclasses.replace(engine.shape).config(engine.device.type, engine.group.timeout)
    places = {info.name.decode(): info for info in lib.buffers(config, engine.group.size, engine.group.rank) if info.kind == lib.MEM_SCHEDULE}

    def words(name: str) -> torch.Tensor:
        info = places[name]
        return schedule[info.offset : info.offset + info.bytes].view(torch.int32)

    sizes = words("segment_tile")[: engine.num_local_experts + 1].diff() * ROW_TILE
    total = int(sizes.sum())
    rows = words("rows").view(-1, _ROW_FIELDS)[:total]
    return RowTable(rows[:, 0].contiguous(), rows[:, 1].contiguous(), sizes.sum(dtype=torch.int32).reshape(1), sizes.int())
