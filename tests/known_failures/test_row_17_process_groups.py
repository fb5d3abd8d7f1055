"""Row 17: a process group for each use is slow and large; one that a rank makes alone hangs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.parallel_state.test_initialize import SETTINGS
from tests.support.pool import run_ranks
from ulysses_mc.parallel_state import (
    ParallelConfig,
    ParallelConfigError,
    RankGrid,
    initialize_model_parallel,
)
from ulysses_mc.parallel_state.state import STANDARD_GROUPS

CASES = [(world, settings) for world, several in SETTINGS.items() for settings in several]


def members_add_up(settings):
    """Every standard group: its ranks, places, and an all-reduce of the global ranks."""
    make, made = dist.new_group, []
    dist.new_group = lambda ranks, **options: (made.append(ranks), make(ranks, **options))[1]
    try:
        state = initialize_model_parallel(ParallelConfig(**settings), use_megatron=False)
    finally:
        dist.new_group = make
    orders = [None] * dist.get_world_size()
    dist.all_gather_object(orders, made)
    assert all(order == made for order in orders)  # else ranks would wait for one another
    me = dist.get_rank()
    assert state.coordinates == state.grid.coordinates(me)
    for axes in STANDARD_GROUPS:
        group, ranks = state.group(*axes), state.ranks(*axes)
        assert tuple(dist.get_process_group_ranks(group)) == ranks == state.grid.group_of(me, *axes)
        assert dist.get_rank(group) == state.rank(*axes) == ranks.index(me)
        assert dist.get_world_size(group) == state.world_size(*axes)
        total = torch.tensor(float(me))
        dist.all_reduce(total, group=group)
        assert total == sum(ranks)
    mine = {state.ranks(*axes): state.group(*axes) for axes in STANDARD_GROUPS}
    assert len(set(mine.values())) == len(mine)  # equal rank sets share a group
    return state.num_groups_created, len(mine)


@pytest.mark.parametrize(("world", "settings"), CASES)
def test_groups_are_those_of_the_grid_and_shared(world, settings):
    grid = RankGrid(ParallelConfig(**settings), world)
    distinct = {tuple(ranks) for axes in STANDARD_GROUPS for ranks in grid.groups(*axes)}
    for created, mine in run_ranks(world, members_add_up, settings):
        assert created == len(distinct)
        assert mine <= len(distinct)


def test_the_documented_counts():
    tp2_ulysses2 = {"tensor_model_parallel_size": 2, "ulysses_parallel_size": 2}
    assert run_ranks(8, members_add_up, tp2_ulysses2)[0] == (24, 6)
    assert run_ranks(8, members_add_up, {"ulysses_parallel_size": 8})[0] == (9, 2)


def asks_for_a_group_of_its_own() -> None:
    config = ParallelConfig(tensor_model_parallel_size=2, ulysses_parallel_size=2)
    state = initialize_model_parallel(config, use_megatron=False)
    if dist.get_rank() == 3:  # no other rank would come
        with pytest.raises(ParallelConfigError, match="all ranks make a group together"):
            state.group("tp", "dp")


def test_one_rank_alone_makes_no_group() -> None:
    run_ranks(8, asks_for_a_group_of_its_own)
