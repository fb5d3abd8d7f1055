"""Process groups through Megatron's own initialiser, on torch's `fake` backend and on gloo."""

import random

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.pool import run_ranks
from ulysses_mc.parallel_state import (
    ParallelConfig,
    ParallelConfigError,
    destroy_model_parallel,
    get_parallel_state,
    initialize_model_parallel,
)
from ulysses_mc.parallel_state.state import STANDARD_GROUPS

pytestmark = pytest.mark.megatron


@pytest.fixture
def mpu():
    """Megatron's module; afterwards nothing of it or of torch.distributed is left."""
    module = pytest.importorskip("megatron.core.parallel_state")
    yield module
    destroy_model_parallel()
    if module.model_parallel_is_initialized():
        module.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def start(rank, world_size, *, options=None, **settings):
    if dist.is_initialized():
        destroy_model_parallel()
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    config = ParallelConfig(**settings)
    # Megatron's gloo copies of some groups would look for the other ranks.
    options = {"create_gloo_process_groups": False, **(options or {})}
    return initialize_model_parallel(config, use_megatron=True, megatron_options=options)


def draws(count):
    """Random sizes, orders and ranks up to 64, fixed by the seed."""
    rng, found = random.Random(7), []
    while len(found) < count:
        tp, ulysses, ring, pp, dp, ep = (rng.choice([1, 2, 2, 3, 4]) for _ in range(6))
        world = tp * ulysses * ring * pp * dp
        if not 1 < world <= 64 or world % (tp * ep * pp):
            continue
        names = rng.sample(["tp", "cp", "ep", "dp"], 4)
        found.append(
            (
                rng.randrange(world),
                world,
                {
                    "tensor_model_parallel_size": tp,
                    "ulysses_parallel_size": ulysses,
                    "ring_parallel_size": ring,
                    "pipeline_model_parallel_size": pp,
                    "expert_model_parallel_size": ep,
                    "order": "-".join([*names, "pp"]),
                },
            )
        )
    return found


@pytest.mark.parametrize(("rank", "world", "settings"), draws(25))
def test_every_group_has_the_ranks_of_the_grid(mpu, rank, world, settings):
    state = start(rank, world, **settings)
    for axes in [*STANDARD_GROUPS, ("tp", "dp"), ("tp", "dp", "cp"), ("tp", "dp", "ulysses")]:
        if axes == ("tp", "dp", "ulysses") and state.world_size("ring") > 1:
            continue
        group = state.group(*axes)
        assert tuple(dist.get_process_group_ranks(group)) == state.ranks(*axes)
    assert mpu.get_context_parallel_rank() == state.rank("cp")
    assert mpu.get_data_parallel_rank() == state.rank("dp")
    assert mpu.get_expert_model_parallel_rank() == state.rank("ep")


def test_groups_are_megatrons_own_and_nothing_is_added_without_ring(mpu):
    state = start(
        11, 32, tensor_model_parallel_size=2, ulysses_parallel_size=4,
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2,
    )  # fmt: skip
    assert state.group("ulysses") is mpu.get_context_parallel_group() is state.group("cp")
    both = mpu.get_data_parallel_group(with_context_parallel=True)
    assert state.group("dp", "ulysses") is both is state.group("dp", "cp")
    assert state.group("dp") is mpu.get_data_parallel_group()
    assert state.group("tp") is mpu.get_tensor_model_parallel_group()
    assert state.group("pp") is mpu.get_pipeline_model_parallel_group()
    assert state.group("tp", "pp") is mpu.get_model_parallel_group()
    assert state.num_groups_created == 0
    assert mpu.get_virtual_pipeline_model_parallel_world_size() == 2
    assert state.is_megatrons("ring")  # of one rank: shares whichever such group there is
    table = state.describe()
    assert "Megatron" in table and "ulysses_mc" not in table


def test_only_ulysses_ring_and_their_products_are_added_with_ring(mpu):
    state = start(5, 16, ulysses_parallel_size=2, ring_parallel_size=2)
    # ulysses: 8 groups, ring: 8, dp x ulysses: 2 of 8 ranks.
    assert state.num_groups_created == 18
    assert not state.is_megatrons("ulysses")
    assert state.group("cp") is mpu.get_context_parallel_group()
    rows = {line.split("  ")[0]: line for line in state.describe().splitlines()}
    assert "ulysses_mc" in rows["ulysses"] and "Megatron" in rows["cp"]


def only_the_last(pipeline_ranks):
    return pipeline_ranks[-1:]


def test_options_reach_megatron_and_unknown_ones_are_refused(mpu):
    options = {"get_embedding_ranks": only_the_last}
    start(7, 8, options=options, pipeline_model_parallel_size=2)
    assert dist.get_process_group_ranks(mpu.get_embedding_group()) == [7]
    with pytest.raises(ParallelConfigError, match="Nearest that work: create_gloo_process_groups"):
        start(0, 8, options={"create_gloo_groups": False})
    with pytest.raises(ParallelConfigError, match="sets 'context_parallel_size'"):
        start(0, 8, options={"context_parallel_size": 2})
    assert not mpu.model_parallel_is_initialized()


def fail(pipeline_ranks):
    raise KeyError("embedding")


def test_a_failure_inside_megatron_leaves_nothing_half_made(mpu):
    with pytest.raises(KeyError):
        start(0, 8, options={"get_embedding_ranks": fail})
    assert not mpu.model_parallel_is_initialized()
    assert start(0, 8).group("dp") is mpu.get_data_parallel_group()


@pytest.mark.parametrize("order", ["tp-pp-cp-dp", "tp-cp-pp-dp"])
def test_orders_that_megatron_refuses(mpu, order):
    with pytest.raises(ParallelConfigError, match="order='tp-ulysses-ring-dp-ep-pp'"):
        start(0, 8, order=order, ulysses_parallel_size=2, pipeline_model_parallel_size=2)
    assert not mpu.model_parallel_is_initialized()
    start(0, 8, order=order, pipeline_model_parallel_size=2)


def test_a_started_megatron_is_adopted_and_left_running(mpu):
    dist.init_process_group("fake", rank=3, world_size=8, store=FakeStore())
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=2, context_parallel_size=2, create_gloo_process_groups=False
    )
    with pytest.raises(ParallelConfigError, match="initialised already"):
        initialize_model_parallel(ParallelConfig(ulysses_parallel_size=4), use_megatron=True)
    config = ParallelConfig(tensor_model_parallel_size=2, ulysses_parallel_size=2)
    state = initialize_model_parallel(config)  # by default: Megatron is imported
    assert state.group("ulysses") is mpu.get_context_parallel_group()
    assert not state.started_megatron
    destroy_model_parallel()
    assert mpu.model_parallel_is_initialized()


def test_initialised_twice_alike_megatron_ends_with_the_last(mpu):
    start(3, 8, tensor_model_parallel_size=2)
    again = initialize_model_parallel(ParallelConfig(tensor_model_parallel_size=2))
    assert again.started_megatron
    destroy_model_parallel()
    assert not mpu.model_parallel_is_initialized()


def test_destroy_leaves_no_group_behind(mpu):
    for world, settings in ((64, {"ulysses_parallel_size": 4}), (8, {"ring_parallel_size": 2})):
        start(1, world, **settings)
        assert get_parallel_state().world_size("cp") == max(settings.values())
        destroy_model_parallel()
        assert not mpu.model_parallel_is_initialized()
        assert len(dist.distributed_c10d._world.pg_map) == 1


def train_like(settings):
    """On real ranks: Megatron's groups and ours reduce over the same ranks, twice in a process."""
    totals = []
    for sizes in settings:
        state = initialize_model_parallel(ParallelConfig(**sizes), use_megatron=True)
        for axes in (("ulysses",), ("ring",), ("dp", "ulysses"), ("dp", "cp"), ("tp", "pp")):
            total = torch.tensor(float(dist.get_rank()))
            dist.all_reduce(total, group=state.group(*axes))
            assert total == sum(state.ranks(*axes))
            totals.append(int(total))
        destroy_model_parallel()
        assert len(dist.distributed_c10d._world.pg_map) == 1
    return totals


def test_on_gloo_ranks_with_other_sizes_in_one_process():
    pytest.importorskip("megatron.core")
    settings = [
        {"tensor_model_parallel_size": 2, "ulysses_parallel_size": 2},
        {"ulysses_parallel_size": 2, "ring_parallel_size": 2},
        {"ulysses_parallel_size": 4},
    ]
    assert len(run_ranks(4, train_like, settings, timeout=90)) == 4


def differing_use():
    with pytest.raises(ParallelConfigError, match="use_megatron: True on rank 0, False on rank 1"):
        initialize_model_parallel(ParallelConfig(), use_megatron=dist.get_rank() == 0)


def test_megatron_on_one_rank_only_is_named():
    pytest.importorskip("megatron.core")
    run_ranks(2, differing_use)
