"""RankGrid against Megatron's own RankGenerator: every size and order up to 64 ranks.

As Megatron itself does, dense groups are compared with its decoder generator (ep=1) and expert
groups with its expert generator (cp=1, tp=expert-tensor size).
"""

import gc
import itertools
from functools import cache

import pytest

from ulysses_mc.parallel_state import ParallelConfig, ParallelConfigError, RankGrid

pytestmark = pytest.mark.megatron
NAMES = ("tp", "cp", "ep", "dp", "pp")
ORDERS = tuple(itertools.permutations(NAMES))
LARGEST = 64


def factorisations(number, count):
    """All tuples of `count` positive integers whose product is `number`."""
    if count == 1:
        return [(number,)]
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return [(d, *rest) for d in divisors for rest in factorisations(number // d, count - 1)]


@pytest.fixture(scope="module")
def megatron():
    """Megatron's module, with its pure group function computed once per argument."""
    module = pytest.importorskip("megatron.core.parallel_state")
    original = module.generate_masked_orthogonal_rank_groups

    @cache
    def cached(world_size, sizes, mask):
        return original(world_size, list(sizes), list(mask))

    def lookup(world_size, parallel_size, mask):
        return cached(world_size, tuple(parallel_size), tuple(mask))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "generate_masked_orthogonal_rank_groups", lookup)
        gc.disable()  # millions of lists without a cycle
        yield module
        gc.enable()


def tokens(names):
    """All non-empty sets of the names."""
    return [c for n in range(1, len(names) + 1) for c in itertools.combinations(names, n)]


def names_above_one(**sizes):
    return {name for name, size in sizes.items() if size > 1}


def orders_that_differ(names, world):
    """All orders of a small world; else one for each arrangement of the axes above size 1."""
    if world <= 6:
        return ORDERS
    return {tuple(n for n in order if n in names): order for order in ORDERS}.values()


def grid_order(order):
    return "-".join(order).replace("cp", "ulysses-ring")


def test_dense_groups(megatron):
    compared = 0
    for world in range(1, LARGEST + 1):
        for tp, cp, dp, pp in factorisations(world, 4):
            large = names_above_one(tp=tp, cp=cp, dp=dp, pp=pp)
            for order in orders_that_differ(large, world):
                theirs = megatron.RankGenerator(
                    tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order="-".join(order)
                )
                ulysses_sizes = [u for u in range(1, cp + 1) if cp % u == 0]
                for ulysses in ulysses_sizes:
                    config = ParallelConfig(
                        tensor_model_parallel_size=tp,
                        pipeline_model_parallel_size=pp,
                        ulysses_parallel_size=ulysses,
                        ring_parallel_size=cp // ulysses,
                        order=grid_order(order),
                    )
                    grid = RankGrid(config, world)
                    # Groups that hold no part of cp alone do not depend on its split.
                    kinds = tokens(("tp", "cp", "dp", "pp")) if ulysses == cp else [("cp",)]
                    for axes in kinds:
                        assert grid.groups(*axes) == theirs.get_ranks("-".join(axes))
                        compared += 1
                    if ulysses == cp:
                        assert grid.groups("ulysses") == theirs.get_ranks("cp")
    assert compared > 100_000


def test_expert_groups(megatron):
    compared = refused = 0
    for world in range(1, LARGEST + 1):
        for etp, ep, edp, pp in factorisations(world, 4):
            large = names_above_one(tp=etp, ep=ep, dp=edp, pp=pp)
            # cp matters only for where the dense pipeline lies: once without, once with all of it.
            for cp in {1, ep * edp} if pp > 1 else {1}:
                config_sizes = {
                    "tensor_model_parallel_size": etp,
                    "pipeline_model_parallel_size": pp,
                    "ulysses_parallel_size": cp,
                    "expert_model_parallel_size": ep,
                }
                names = large | ({"cp"} if cp > 1 else {"dp"})
                for order in orders_that_differ(names, world):
                    text = "-".join(order)
                    theirs = megatron.RankGenerator(tp=etp, ep=ep, dp=edp, pp=pp, cp=1, order=text)
                    dense = megatron.RankGenerator(
                        tp=etp, ep=1, dp=ep * edp // cp, pp=pp, cp=cp, order=text
                    )
                    config = ParallelConfig(order=grid_order(order), **config_sizes)
                    try:
                        grid = RankGrid(config, world)
                    except ParallelConfigError:
                        assert theirs.get_ranks("pp") != dense.get_ranks("pp")
                        refused += 1
                        continue
                    if config.has_experts:
                        assert theirs.get_ranks("pp") == dense.get_ranks("pp")
                    for token in tokens(("tp", "ep", "dp", "pp")):
                        axes = [{"tp": "etp", "dp": "edp"}.get(name, name) for name in token]
                        if "etp" in axes or "ep" in axes or "edp" in axes:
                            assert grid.groups(*axes) == theirs.get_ranks("-".join(token))
                            compared += 1
    assert compared > 100_000
    assert refused > 100
