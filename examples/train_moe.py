#!/usr/bin/env python3
"""Trains a small mixture-of-experts language model on the bytes of text files.

    python3 examples/train_moe.py                                  MoK, on a GPU if there is one
    python3 examples/train_moe.py --layer plain                    the same model on PyTorch's own path: sort, all-to-all, grouped_mm
    python3 examples/train_moe.py --layer both                     both, step by step in turn: the ratio of their speeds
    torchrun --standalone --nproc-per-node=4 examples/train_moe.py --ep 2      experts over 2 ranks, times 2 for data

Attention is PyTorch's. Parameters are bf16 with fp32 copies in the optimizer; expert gradients are added up in fp32 by the layer itself
(main_grad). Prints loss and tokens per second, the loss on held-out text, and a digest of all parameters: equal runs end with equal digests.
"""

import argparse
import hashlib
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import mok

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))
import baseline  # noqa: E402


# --- model --------------------------------------------------------------------------------------------------------------
class PlainMoE(mok.MoE):
    """The same layer and parameters, computed as PyTorch does it today."""

    def forward(self, x, **_):
        rows = x.reshape(-1, x.shape[-1])
        logits = F.linear(rows.float(), self.router.weight.float())
        weights, ids = logits.softmax(-1).topk(self.topk, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = baseline.moe_layer(rows, ids, weights, self.gate, self.down, self._group, self.engine.group.size)
        if self.shared_gate is not None:
            out = out + F.linear(baseline.swiglu(F.linear(rows, self.shared_gate)), self.shared_down)
        return out.view(x.shape), mok.Routing(ids, weights, logits, None)


class Block(nn.Module):
    def __init__(self, o, layer, index, group, device):
        super().__init__()
        kind = {"dtype": torch.bfloat16, "device": device}
        self.heads = o.heads
        self.norm1, self.norm2 = nn.RMSNorm(o.hidden, **kind), nn.RMSNorm(o.hidden, **kind)
        self.qkv, self.proj = nn.Linear(o.hidden, 3 * o.hidden, bias=False, **kind), nn.Linear(o.hidden, o.hidden, bias=False, **kind)
        make = PlainMoE if layer == "plain" else mok.MoE
        self.moe = make(o.hidden, o.intermediate, o.experts, o.topk, shared_intermediate=o.shared, gate_up="combined", group=group, max_tokens=o.batch * o.context,
                        device=device, main_grad=layer != "plain", recompute=o.recompute, layer=index)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y, routing = self.moe(self.norm2(x), return_routing=True)
        return x + y, routing


class Model(nn.Module):
    def __init__(self, o, layer, group, device):
        super().__init__()
        kind = {"dtype": torch.bfloat16, "device": device}
        self.topk = o.topk
        self.embed, self.place = nn.Embedding(256, o.hidden, **kind), nn.Embedding(o.context, o.hidden, **kind)
        self.blocks = nn.ModuleList(Block(o, layer, i, group, device) for i in range(o.layers))
        self.norm, self.head = nn.RMSNorm(o.hidden, **kind), nn.Linear(o.hidden, 256, bias=False, **kind)
        for table in (self.embed, self.place):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, text):
        """text [B, context + 1] -> loss in nats per byte, and the balance loss of all layers."""
        x = self.embed(text[:, :-1]) + self.place.weight[: text.shape[1] - 1]
        balance = 0.0
        for block in self.blocks:
            x, routing = block(x)
            chosen = torch.zeros_like(routing.logits).scatter_add_(-1, routing.expert_ids.long(), torch.ones_like(routing.router_weights)).mean(0)
            balance = balance + (chosen * routing.logits.softmax(-1).mean(0)).sum() * chosen.numel() / self.topk
        loss = F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), text[:, 1:].flatten())
        return loss, balance


# --- optimizer and ranks ------------------------------------------------------------------------------------------------
class Trainer:
    """One model with its optimizer. Experts are the same on every data-parallel rank of one expert rank, all else on every rank of the world."""

    def __init__(self, o, layer, ranks, device):
        torch.manual_seed(o.seed)
        self.layer, self.ranks, self.o = layer, ranks, o
        self.model = Model(o, layer, ranks.expert_group, device)
        self.parameters = list(self.model.parameters())
        self.of_experts = {id(p) for block in self.model.blocks for p in block.moe.expert_parameters()}
        for p in self.parameters:
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)
        self.masters = [p.detach().float().clone() for p in self.parameters]
        self.optimizer = torch.optim.AdamW(self.masters, lr=o.lr, betas=(0.9, 0.95), weight_decay=0.1)
        self.losses, self.times = [], []

    def reduce(self):
        """main_grad becomes the gradient of the mean over all tokens of the world."""
        for p in self.parameters:
            if p.grad is not None:
                p.main_grad += p.grad
                p.grad = None
            if self.ranks.world > 1:
                experts = id(p) in self.of_experts
                if not experts or self.ranks.data_size > 1:
                    dist.all_reduce(p.main_grad, group=self.ranks.data_group if experts else None)
                p.main_grad /= self.ranks.world

    def step(self, batches, lr):
        """Gradient accumulation over `batches`, and one step of the optimizer. -> loss"""
        total = 0.0
        for text in batches:
            loss, balance = self.model(text)
            ((loss + self.o.balance * balance) / len(batches)).backward()
            total += loss.detach() / len(batches)
        self.reduce()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        norm = torch.stack([p.main_grad.norm() for p in self.parameters]).norm()
        if self.ranks.world > 1:  # each rank sees its own experts: all use the largest
            dist.all_reduce(norm, op=dist.ReduceOp.MAX)
        scale = (1.0 / norm.clamp(min=1.0))
        for master, p in zip(self.masters, self.parameters):
            master.grad = p.main_grad * scale
        self.optimizer.step()
        with torch.no_grad():
            for master, p in zip(self.masters, self.parameters):
                p.copy_(master)
                p.main_grad.zero_()
        if self.ranks.world > 1:
            dist.all_reduce(total)
            total /= self.ranks.world
        return total.item()

    def digest(self):
        h = hashlib.sha256()
        for p in self.parameters:
            h.update(p.detach().cpu().view(torch.uint8).numpy().tobytes())
        return h.hexdigest()[:16]


class Ranks:
    def __init__(self, o):
        self.world, self.rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        kind = o.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if kind == "cuda" else torch.device("cpu")
        if kind == "cuda":
            torch.cuda.set_device(self.device)
        expert_size = o.ep or self.world
        if self.world % expert_size:
            raise SystemExit(f"--ep {expert_size} does not divide the {self.world} ranks")
        self.data_size, self.expert_group, self.data_group = self.world // expert_size, None, None
        if self.world == 1:
            return
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", **({"device_id": self.device} if kind == "cuda" else {}))
        for first in range(0, self.world, expert_size):  # every rank makes all groups, in the same order
            group = dist.new_group(list(range(first, first + expert_size)))
            self.expert_group = group if first <= self.rank < first + expert_size else self.expert_group
        for place in range(expert_size):
            group = dist.new_group(list(range(place, self.world, expert_size)))
            self.data_group = group if self.rank % expert_size == place else self.data_group


# --- text ---------------------------------------------------------------------------------------------------------------
def read_text(paths):
    """The files' bytes; without any, this repository's own documents and sources."""
    if not paths:
        paths = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("include/*.h"), *ROOT.glob("src/**/*.c"), *ROOT.glob("src/**/*.h"), *ROOT.glob("python/mok/*.py")])
    data = b"\n".join(Path(p).read_bytes() for p in paths)
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    cut = int(0.95 * len(text))
    return text[:cut], text[cut:]


def draw(text, o, step, rank, device):
    g = torch.Generator().manual_seed(hash((o.seed, step, rank)) % 2**62)
    starts = torch.randint(len(text) - o.context - 1, (o.batch,), generator=g)
    return torch.stack([text[s : s + o.context + 1] for s in starts]).to(device)


def held_out_loss(trainer, text, o, ranks):
    with torch.no_grad():
        losses = [trainer.model(draw(text, o, -1 - i, ranks.rank, ranks.device))[0] for i in range(4)]
        loss = torch.stack(losses).mean()
    if ranks.world > 1:
        dist.all_reduce(loss)
        loss /= ranks.world
    return loss.item()


# --- main ---------------------------------------------------------------------------------------------------------------
def draw_plot(trainers, path, tokens):
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print(f"{path} was not drawn: matplotlib is not installed")
        return
    figure, axis = plt.subplots(figsize=(7, 4))
    for t in trainers:
        axis.plot(range(1, len(t.losses) + 1), t.losses, label=f"{t.layer}: {tokens / statistics.median(t.times):,.0f} tokens/s", linewidth=1.2)
    axis.set_xlabel("step")
    axis.set_ylabel("loss, nats per byte")
    axis.legend()
    axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def parse(arguments=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--layer", default="mok", choices=("mok", "plain", "both"))
    p.add_argument("--text", nargs="*", default=[], help="files to learn; default: this repository's documents and sources")
    p.add_argument("--device", choices=("cpu", "cuda"))
    p.add_argument("--ep", type=int, default=0, help="ranks that share the experts; default: all")
    for name, value in dict(steps=200, layers=2, hidden=128, heads=4, intermediate=128, shared=0, experts=8, topk=2, context=64, batch=16, accumulate=1, seed=1, warmup=20).items():
        p.add_argument(f"--{name}", type=int, default=value)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--balance", type=float, default=0.01, help="weight of the loss that keeps experts equally busy")
    p.add_argument("--recompute", action="store_true", help="MoK keeps no activations of the experts")
    p.add_argument("--plot", default="train_moe.png", help="empty for none")
    p.add_argument("--json", help="write losses and times here")
    return p.parse_args(arguments)


def main(arguments=None):
    o = parse(arguments)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    ranks = Ranks(o)
    train, held_out = read_text(o.text)
    trainers = [Trainer(o, layer, ranks, ranks.device) for layer in (("mok", "plain") if o.layer == "both" else (o.layer,))]
    tokens = o.batch * o.context * o.accumulate * ranks.world
    if ranks.rank == 0:
        size = sum(p.numel() for p in trainers[0].parameters)
        print(f"{ranks.device}, {ranks.world} rank(s), experts over {ranks.world // ranks.data_size}; {size:,} parameters here, {len(train):,} bytes of text, {tokens:,} tokens a step")
    for step in range(o.steps):
        lr = o.lr * min(1.0, (step + 1) / o.warmup) * (0.1 + 0.9 * (1 - step / o.steps))
        batches = [draw(train, o, step * o.accumulate + i, ranks.rank, ranks.device) for i in range(o.accumulate)]
        for t in trainers:
            if ranks.device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            t.losses.append(t.step(batches, lr))  # .item() waits for the device
            t.times.append(time.perf_counter() - start)
        if ranks.rank == 0 and (step % max(1, o.steps // 10) == 0 or step == o.steps - 1):
            print(f"step {step + 1:5d}  " + "  ".join(f"{t.layer}: loss {t.losses[-1]:.4f}, {tokens / t.times[-1]:,.0f} tokens/s" for t in trainers), flush=True)
    results = {}
    for t in trainers:
        results[t.layer] = {"held_out_loss": held_out_loss(t, held_out, o, ranks), "tokens_per_second": tokens / statistics.median(t.times[len(t.times) // 10 :]),
                            "digest": t.digest(), "losses": t.losses, "seconds": t.times}
    if ranks.rank == 0:
        for name, r in results.items():
            print(f"{name}: held-out loss {r['held_out_loss']:.4f}, {r['tokens_per_second']:,.0f} tokens/s (median), parameters of rank 0: {r['digest']}")
        if len(trainers) == 2:
            ratios = sorted(b / a for a, b in zip(trainers[0].times, trainers[1].times))
            print(f"mok is {statistics.median(ratios):.3f} times as fast as plain (quartiles {ratios[len(ratios) // 4]:.3f} to {ratios[3 * len(ratios) // 4]:.3f}, {len(ratios)} steps in turn)")
        if o.json:
            Path(o.json).write_text(json.dumps(results) + "\n")
        if o.plot:
            draw_plot(trainers, o.plot, tokens)
    if ranks.world > 1:
        dist.destroy_process_group()
    return results


if __name__ == "__main__":
    main()
