"""torch.compile of a plain PyTorch model: the same numbers, and nothing compiled again."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import run_ranks
from ulysses_mc import HeadLayout, SequenceLayout
from ulysses_mc.exchange import Cut, sequence_to_heads
from ulysses_mc.layers import UlyssesAttention

S, HEADS, KV, D = 8, 4, 2, 4


class Layer(torch.nn.Module):
    """A pre-norm attention and MLP layer as in everyone's model."""

    def __init__(self, layout: SequenceLayout) -> None:
        super().__init__()
        hidden = HEADS * D
        self.norm = torch.nn.LayerNorm(hidden)
        self.qkv = torch.nn.Linear(hidden, (HEADS + 2 * KV) * D)
        self.attention = UlyssesAttention(dist.group.WORLD, layout)
        self.out = torch.nn.Linear(hidden, hidden)
        self.mlp = torch.nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (HEADS + 2 * KV, D))
        query, key, value = qkv.split([HEADS, KV, KV], 2)
        x = x + self.out(self.attention(query, key, value, causal=True, window=(5, 0)).flatten(2))
        return x + torch.nn.functional.gelu(self.mlp(x))


def train(compiled: bool, steps: int) -> tuple[list[torch.Tensor], list[int]]:
    """Every step's loss and last gradients, and how many graphs there were after it."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    layout = SequenceLayout.contiguous(S, dist.get_world_size())
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(*(Layer(layout) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    found, graphs = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own, on what it does not compile
        for step in range(steps):
            whole = torch.randn(2, S, HEADS * D, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            loss = run(layout.shard(whole, 1, dist.get_rank())).square().mean()
            loss.backward()
            found.append(torch.cat([p.grad.flatten() for p in model.parameters()] + [loss[None]]))
            optimizer.step()
            graphs.append(counters["stats"]["unique_graphs"])
    torch._dynamo.reset()
    return [tensor.detach() for tensor in found], graphs


@pytest.mark.parametrize("ranks", [1, 2])
def test_same_numbers_and_no_recompilation(ranks: int) -> None:
    plain = run_ranks(ranks, train, False, 4, timeout=60)
    compiled = run_ranks(ranks, train, True, 4, timeout=120)
    for (right, no_graphs), (found, graphs) in zip(plain, compiled, strict=True):
        assert all(step.isfinite().all() for step in right)
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
        assert no_graphs == [0] * 4
        assert graphs[0] > 0  # it was compiled
        assert graphs[1:] == graphs[:1] * 3, graphs


def step_as_a_whole() -> list[str]:
    """What the compiler says where it meets the exchange itself, in forward and in backward."""
    import torch._dynamo

    group, size = dist.group.WORLD, dist.get_world_size()
    cut = Cut.of(SequenceLayout.contiguous(S, size), HeadLayout(HEADS, HEADS, size).query_heads)

    def step(x: torch.Tensor) -> torch.Tensor:
        (by_heads,) = sequence_to_heads([2 * x], [cut], group, batch_first=True)
        loss = by_heads.square().sum()
        loss.backward()
        return loss.detach()

    torch._dynamo.reset()
    x = torch.ones(1, S // size, HEADS, D, requires_grad=True)
    with warnings.catch_warnings(record=True) as met:
        warnings.simplefilter("always")
        loss = torch.compile(step, backend="aot_eager")(x)
    torch._dynamo.reset()
    assert loss == 4 * S * HEADS // size * D
    assert torch.equal(x.grad, torch.full_like(x, 8.0))
    return [str(warning.message) for warning in met]


def test_the_compiler_has_nothing_to_say_of_an_exchange() -> None:
    for met in run_ranks(2, step_as_a_whole, timeout=120):
        assert not [text for text in met if "Dynamo" in text]
