"""Row 11: dropout masks are equal or unequal where they must not be (plain PyTorch)."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.pool import run_ranks
from ulysses_mc.layers import UlyssesAttention
from ulysses_mc.layers.random import rank_distinct_rng

P, S, HEADS = 0.1, 64, 4


def attention_masks() -> torch.Tensor:
    """[s, h, s] for this rank's queries: which weights were kept.

    With keys of 0 every weight is 1/s, and with values of one-hot rows the output is the weights.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    value = torch.eye(S)[None, :, None].expand(1, S, HEADS, S).chunk(size, 1)[rank]
    query = torch.zeros(1, S // size, HEADS, 4)
    torch.manual_seed(1)
    out = UlyssesAttention(dist.group.WORLD)(query, query, value, dropout_p=P)
    return out[0] > 0


def test_attention_masks_differ_between_head_shards() -> None:
    kept = torch.cat(run_ranks(2, attention_masks), 0).transpose(0, 1)  # [h, s, s]
    for a in range(HEADS):
        for b in range(a):
            assert not torch.equal(kept[a], kept[b])
    trials = kept.numel()
    assert abs(kept.float().mean().item() - (1 - P)) < 4 * (P * (1 - P) / trials) ** 0.5


def hidden_masks() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the rank's hidden states; a draw per sample after it; the mask at recomputation."""
    torch.manual_seed(1)
    seen: list[torch.Tensor] = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        with rank_distinct_rng(dist.get_rank(), x.device):
            dropped = F.dropout(x, P)
        seen.append((dropped > 0).detach())
        return dropped * x  # saves its inputs, so that it is recomputed

    x = torch.ones(S, S, requires_grad=True)
    out = checkpoint(layer, x, use_reentrant=False)
    per_sample = torch.rand(8)  # stochastic depth, noise levels
    out.sum().backward()
    return seen[0], per_sample, seen[1]


def test_hidden_masks_per_sample_draws_and_recomputation() -> None:
    (first, draws, again), (second, draws_of_second, again_of_second) = run_ranks(2, hidden_masks)
    assert not torch.equal(first, second)
    assert torch.equal(draws, draws_of_second)
    assert torch.equal(first, again) and torch.equal(second, again_of_second)
    kept = torch.stack([first, second])
    assert abs(kept.float().mean().item() - (1 - P)) < 4 * (P * (1 - P) / kept.numel()) ** 0.5
