"""Row 3: the divisibility check forgets tensor parallelism, which cuts the heads first."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import run_ranks
from tests.support.sharded import check_against_oracle, draw_qkv
from tests.support.wire import count_wire
from ulysses_mc import HeadDivisibilityError, HeadLayout, ParallelConfigError
from ulysses_mc.layers import UlyssesAttention

CASES = [(12, 2, 4, [2, 2, 1, 1]), (8, 4, 4, [1, 1, 0, 0])]


@pytest.mark.parametrize(("heads", "tensor", "ulysses", "runs"), CASES)
def test_exact_on_every_tensor_parallel_rank(heads, tensor, ulysses, runs) -> None:
    assert heads % ulysses == 0  # which says nothing
    layout = HeadLayout(heads, heads, ulysses, tensor)
    assert [len(run) for run in layout.query_heads] == runs
    whole = draw_qkv(1, 8, heads, heads)
    for rank in range(tensor):
        held = layout.local_heads
        cut = tuple(t[:, :, rank * held : (rank + 1) * held] for t in whole)
        check_against_oracle(ulysses, cut, causal=True)


@pytest.mark.parametrize(("heads", "tensor", "ulysses", "runs"), CASES)
def test_or_refused_with_all_numbers(heads, tensor, ulysses, runs) -> None:
    with pytest.raises(HeadDivisibilityError) as refused:
        HeadLayout(heads, heads, ulysses, tensor, uneven_heads=False)
    message = str(refused.value)
    assert f"{heads} query heads and {heads} key/value heads" in message
    assert f"tensor_model_parallel_size={tensor} x ulysses_parallel_size={ulysses}" in message
    assert f"{heads} / {tensor} = {heads // tensor} query" in message
    assert "Nearest that work" in message and ",".join(map(str, runs)) in message


def refuse(local_heads: int) -> int:
    """Returns the number of collectives before the refusal."""
    attention = UlyssesAttention(dist.group.WORLD, uneven_heads=False)
    tensors = [torch.zeros(1, 2, local_heads, 4) for _ in range(3)]
    with count_wire() as wire, pytest.raises(ParallelConfigError, match=f"{local_heads} heads"):
        attention(*tensors)
    return wire.exchanges


@pytest.mark.parametrize("local_heads", [6, 2])
def test_refused_on_every_rank_before_any_collective(local_heads) -> None:
    assert run_ranks(4, refuse, local_heads) == [0, 0, 0, 0]
