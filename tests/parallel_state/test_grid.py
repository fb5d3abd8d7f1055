"""RankGrid against brute force: every rank's coordinates say who is in its group."""

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ulysses_mc.parallel_state import ParallelConfig, ParallelConfigError, RankGrid

ORDERS = [
    "-".join(axes).replace("cp", "ulysses-ring")
    for axes in itertools.permutations(["tp", "cp", "ep", "dp", "pp"])
]


@st.composite
def grids(draw):
    size = st.integers(1, 4)
    tp, ulysses, ring, dp, pp = (draw(size) for _ in range(5))
    config = ParallelConfig(
        tensor_model_parallel_size=tp,
        ulysses_parallel_size=ulysses,
        ring_parallel_size=ring,
        pipeline_model_parallel_size=pp,
        order=draw(st.sampled_from(ORDERS)),
    )
    return RankGrid(config, tp * ulysses * ring * dp * pp)


def brute_force(grid, axes):
    """Ranks sorted into groups by the coordinates along all other axes."""
    inside = {name for axis in axes for name in (("ulysses", "ring") if axis == "cp" else (axis,))}
    buckets = {}
    for rank in range(grid.world_size):
        coordinates, rest = {}, rank
        for axis, size in grid.dense_shape:
            rest, coordinates[axis] = divmod(rest, size)
        key = tuple(value for axis, value in coordinates.items() if axis not in inside)
        buckets.setdefault(key, []).append(rank)
    return sorted(buckets.values())


@settings(max_examples=150, deadline=None)
@given(grids(), st.sets(st.sampled_from(["tp", "ulysses", "ring", "cp", "dp", "pp"]), min_size=1))
def test_groups_partition_the_world_by_coordinates(grid, axes):
    groups = grid.groups(*axes)
    assert sorted(groups) == brute_force(grid, axes)
    assert {len(group) for group in groups} == {grid.size(*axes)}
    for group in groups:
        assert group == sorted(group)
        for index, rank in enumerate(group):
            assert list(grid.group_of(rank, *axes)) == group
            assert grid.index(rank, *axes) == index


def test_the_worked_example():
    config = ParallelConfig(tensor_model_parallel_size=2, ulysses_parallel_size=2)
    grid = RankGrid(config, 8)
    assert grid.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert grid.groups("ulysses") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.groups("dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert grid.groups("dp", "ulysses") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert grid.coordinates(6) == {
        "tp": 0, "ulysses": 1, "ring": 0, "dp": 1, "pp": 0, "cp": 1, "etp": 0, "ep": 0, "edp": 3,
    }  # fmt: skip


def test_ulysses_changes_faster_than_ring():
    config = ParallelConfig(ulysses_parallel_size=2, ring_parallel_size=3, order="dp-cp-tp-ep-pp")
    grid = RankGrid(config, 6)
    assert grid.groups("ulysses") == [[0, 1], [2, 3], [4, 5]]
    assert grid.groups("ring") == [[0, 2, 4], [1, 3, 5]]
    assert [grid.index(rank, "cp") for rank in range(6)] == list(range(6))


def test_experts_lie_on_their_own_array():
    config = ParallelConfig(
        tensor_model_parallel_size=2,
        ulysses_parallel_size=2,
        expert_model_parallel_size=4,
        expert_tensor_parallel_size=1,
    )
    grid = RankGrid(config, 8)
    assert grid.groups("ep") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert grid.groups("edp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert grid.groups("etp") == [[rank] for rank in range(8)]
    assert grid.groups("etp", "ep", "pp") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ParallelConfigError, match="mixes the axes"):
        grid.groups("tp", "ep")


def test_experts_with_other_pipeline_stages_are_refused():
    sizes = {"pipeline_model_parallel_size": 2, "ulysses_parallel_size": 2}
    dense = RankGrid(ParallelConfig(order="tp-ep-pp-cp-dp", **sizes), 8)
    assert dense.groups("pp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    config = ParallelConfig(order="tp-ep-pp-cp-dp", expert_model_parallel_size=2, **sizes)
    with pytest.raises(ParallelConfigError, match="order='tp-ep-ulysses-ring-dp-pp'"):
        RankGrid(config, 8)


def test_unknown_axes_and_ranks():
    grid = RankGrid(ParallelConfig(), 2)
    with pytest.raises(ParallelConfigError, match="Nearest that work: 'ulysses'"):
        grid.groups("ulyses")
    with pytest.raises(ParallelConfigError, match="unknown axis none"):
        grid.groups()
    with pytest.raises(ParallelConfigError, match="ranks run from 0 to 1"):
        grid.coordinates(2)


def test_all_groups_of_100000_ranks_in_two_seconds():
    config = ParallelConfig(
        tensor_model_parallel_size=8,
        ulysses_parallel_size=4,
        ring_parallel_size=5,
        pipeline_model_parallel_size=5,
        expert_model_parallel_size=10,
        expert_tensor_parallel_size=1,
    )
    grid = RankGrid(config, 100_000)
    kinds = [
        ("tp",), ("ulysses",), ("ring",), ("cp",), ("dp",), ("pp",), ("dp", "ulysses"),
        ("dp", "cp"), ("tp", "pp"), ("tp", "cp"), ("ep",), ("etp",), ("edp",), ("etp", "ep", "pp"),
    ]  # fmt: skip
    start = time.process_time()
    counts = [len(grid.groups(*axes)) for axes in kinds]
    seconds = time.process_time() - start
    assert counts == [100_000 // grid.size(*axes) for axes in kinds]
    assert seconds < 2, f"{seconds:.2f} s"


def test_table_and_picture_of_8_ranks():
    grid = RankGrid(ParallelConfig(tensor_model_parallel_size=2, ulysses_parallel_size=2), 8)
    table = grid.describe(5)
    assert "8 ranks = tp 2 x ulysses 2 x ring 1 x dp 2 x pp 1" in table
    assert "rank 5: tp 1, ulysses 0, ring 0, dp 1, pp 0" in table
    rows = {line.split("  ")[0].strip(): line for line in table.splitlines()}
    assert rows["ulysses"].split()[1:5] == ["2", "4", "5,", "7"]
    assert rows["dp x cp"].split()[3:9] == ["4", "2", "1,", "3,", "5,", "7"]
    assert "ep" not in rows
    assert grid.picture("ulysses").splitlines()[1] == "node 0 | 0:0 1:1 2:0 3:1 4:2 5:3 6:2 7:3"
    assert grid.picture("ulysses", ranks_per_node=2).splitlines()[4] == "node 3 | 6:2 7:3"


def test_picture_of_4096_ranks_stays_short():
    config = ParallelConfig(
        tensor_model_parallel_size=8, ulysses_parallel_size=4, expert_model_parallel_size=4
    )
    grid = RankGrid(config, 4096)
    lines = grid.picture("ulysses").splitlines()
    assert len(lines) == 10
    assert max(map(len, lines)) <= 100
    assert "a group spans 4 nodes" in lines[0]
    assert "504 nodes more" in lines[5]
    assert lines[-1].startswith("node 511 |")
    assert max(map(len, grid.describe(4095).splitlines())) <= 120
    assert len(grid.describe().splitlines()) < 20
