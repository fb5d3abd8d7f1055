"""Ulysses in a plain PyTorch model: two changes, marked. Runs on CPUs and on GPUs.

torchrun --nproc-per-node 4 examples/add_ulysses_to_your_model.py
"""

import torch
import torch.distributed as dist
from torch import nn

from ulysses_mc import SequenceLayout, cross_entropy, shard_batch, shift_labels, token_mean_loss
from ulysses_mc.layers import UlyssesAttention


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, attention: nn.Module) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), heads
        self.attention = attention  # was: F.scaled_dot_product_attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [b, s/P, dim]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        return x + self.out(self.attention(q, k, v, causal=True).flatten(2))


dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
torch.set_default_device(f"cuda:{dist.get_rank()}" if torch.cuda.is_available() else "cpu")
group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)  # the same weights and tokens on every rank
tokens = torch.randint(0, 100, (2, 1000))  # 1000 tokens over any number of ranks
batch = {"tokens": tokens, "labels": shift_labels(tokens)}
layout = SequenceLayout.contiguous(1000, ranks)
part = shard_batch(batch, layout, rank)  # <- 1. this rank's tokens
attention = UlyssesAttention(group, layout)  # <- 2. attention over all of them
model = nn.Sequential(nn.Embedding(100, 64), Block(64, 8, attention), nn.Linear(64, 100))
loss = token_mean_loss(*cross_entropy(model(part["tokens"]), part["labels"]), group)
loss.backward()
print(f"rank {rank} of {ranks}: {part['tokens'].shape[1]} tokens, loss {loss.item():.6f}")
dist.destroy_process_group()
