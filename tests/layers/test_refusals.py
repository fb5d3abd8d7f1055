"""What UlyssesAttention refuses when it is built, on every rank and before any collective."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import run_ranks
from tests.support.wire import count_wire
from ulysses_mc import ParallelConfigError, SequenceLayout
from ulysses_mc.layers import UlyssesAttention
from ulysses_mc.parallel_state import ParallelConfig, initialize_model_parallel


def beside_a_ring() -> str:
    sizes = ParallelConfig(ulysses_parallel_size=2, ring_parallel_size=2)
    state = initialize_model_parallel(sizes)
    with pytest.raises(ParallelConfigError, match="no ring attention yet") as error:
        UlyssesAttention(state.group("ulysses"))
    UlyssesAttention(dist.group.WORLD)  # all four parts of the sequence
    return str(error.value)


def test_the_ulysses_group_inside_a_ring() -> None:
    for message in run_ranks(4, beside_a_ring):
        assert "2 of the 4 parts" in message
        assert "ulysses_parallel_size 4 with ring_parallel_size 1" in message


def layout_of_another_size(argument: str) -> str:
    layouts = {argument: SequenceLayout.contiguous(13, 4)}
    with pytest.raises(ParallelConfigError, match="for 4") as error:
        UlyssesAttention(dist.group.WORLD, **layouts)
    return str(error.value)


@pytest.mark.parametrize("argument", ["sequence_layout", "kv_sequence_layout"])
def test_a_layout_for_another_group_size(argument) -> None:
    for message in run_ranks(2, layout_of_another_size, argument):
        assert "SequenceLayout.contiguous(13, 2)" in message


def heads_at_construction() -> str:
    with pytest.raises(ParallelConfigError, match="uneven_heads=False") as error:
        UlyssesAttention(dist.group.WORLD, num_heads=5, uneven_heads=False)
    return str(error.value)


def test_heads_given_are_checked_and_what_is_offered_works() -> None:
    for message in run_ranks(2, heads_at_construction):
        assert "ulysses_parallel_size 1 or 5" in message


def a_mask_of_the_true_length() -> tuple[str, int]:
    """Without a layout 4 and 3 tokens are taken for 8 and 6; a mask of 7 x 7 fits neither."""
    local = [torch.zeros(1, 4 - dist.get_rank(), 2, 4) for _ in range(3)]
    mask = torch.ones(7, 7, dtype=torch.bool)
    with count_wire() as wire, pytest.raises(ParallelConfigError) as error:
        UlyssesAttention(dist.group.WORLD)(*local, attention_mask=mask)
    return str(error.value), wire.exchanges


def test_unequal_lengths_without_a_layout_where_they_show() -> None:
    for message, exchanges in run_ranks(2, a_mask_of_the_true_length):
        assert "sequence_layout=..." in message and exchanges == 0
