"""A rank that holds no heads takes part in everything that the attention itself brings along:
parameters, hooks, wrappers, what its backward pass refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.support.oracle import attention
from tests.support.pool import run_ranks
from tests.support.sharded import draw_qkv
from ulysses_mc import SequenceLayout
from ulysses_mc.layers import UlyssesAttention
from ulysses_mc.layers.local import sdpa_attention

S, HEADS, RANKS = 7, 2, 3


class Tempered(torch.nn.Module):
    """A local attention with a temperature that is learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = torch.nn.Parameter(torch.tensor([1.3], dtype=torch.float64))

    def forward(self, query: Any, key: Any, value: Any, *, causal: bool = False) -> torch.Tensor:
        return sdpa_attention(query * self.temperature, key, value, causal=causal)


def whole_gradient(steps: int) -> torch.Tensor:
    query, key, value = draw_qkv(2, S, HEADS, HEADS)
    temperature = torch.tensor([1.3], dtype=torch.float64, requires_grad=True)
    for _ in range(steps):
        attention(query * temperature, key, value, causal=True).square().sum().backward()
    assert temperature.grad is not None
    return temperature.grad


def learn(wrapper: str, frozen: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    layout = SequenceLayout.contiguous(S, size)
    local = [
        layout.shard(t, 1, rank).clone().requires_grad_(not frozen)
        for t in draw_qkv(2, S, HEADS, HEADS)
    ]
    tempered = Tempered()
    if wrapper == "fsdp2":
        fully_shard(tempered)
    model: Any = UlyssesAttention(dist.group.WORLD, layout, local_attention=tempered)
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
    for _ in range(2):
        model(*local, causal=True).square().sum().backward()
    gradient = tempered.temperature.grad
    assert gradient is not None
    if isinstance(gradient, DTensor):
        gradient = gradient.full_tensor()
    if wrapper:  # which take the mean
        gradient = gradient * size
    else:
        dist.all_reduce(gradient)
    torch.testing.assert_close(gradient, whole_gradient(2), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("wrapper", ["", "ddp", "fsdp2"])
def test_parameters_of_the_local_attention_get_gradients(wrapper, frozen) -> None:
    run_ranks(RANKS, learn, wrapper, frozen, timeout=60)


def differentiate_twice() -> str:
    rank, size = dist.get_rank(), dist.get_world_size()
    layout = SequenceLayout.contiguous(S, size)
    local = [
        layout.shard(t, 1, rank).clone().requires_grad_() for t in draw_qkv(2, S, HEADS, HEADS)
    ]
    out = UlyssesAttention(dist.group.WORLD, layout)(*local, causal=True)
    first = torch.autograd.grad(out.square().sum(), local, create_graph=True)
    with pytest.raises(RuntimeError) as error:
        torch.autograd.grad(sum(g.square().sum() for g in first), local)
    return str(error.value)


def test_what_a_kernel_refuses_in_backward_is_refused_on_every_rank() -> None:
    messages = run_ranks(RANKS, differentiate_twice, timeout=60)
    assert all("is not implemented" in message for message in messages), messages
