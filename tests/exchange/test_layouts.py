"""HeadLayout and SequenceLayout, without processes."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ulysses_mc import HeadDivisibilityError, HeadLayout, ParallelConfigError, SequenceLayout

kv_and_repeats = st.tuples(st.integers(1, 12), st.integers(1, 8))


def sizes(layout: HeadLayout) -> list[int]:
    return [len(run) for run in layout.query_heads]


@settings(max_examples=300, deadline=None)
@given(kv_and_repeats, st.integers(1, 16))
def test_runs_partition_the_heads_and_bring_what_they_read(kv_repeats, ranks):
    kv, repeats = kv_repeats
    layout = HeadLayout(kv * repeats, kv, ranks)
    assert [head for run in layout.query_heads for head in run] == list(range(kv * repeats))
    assert max(sizes(layout)) - min(sizes(layout)) <= 1
    for rank, (queries, keys) in enumerate(zip(layout.query_heads, layout.kv_heads, strict=True)):
        read = [head // repeats for head in queries]
        assert list(keys) == sorted(set(read))
        expansion = layout.kv_expansion(rank)
        if expansion is not None:
            assert [keys.start + index for index in expansion] == read
        elif queries:
            group = len(queries) // len(keys)
            assert [keys.start + i // group for i in range(len(queries))] == read


@settings(max_examples=100, deadline=None)
@given(kv_and_repeats, st.integers(1, 8))
def test_no_placement_of_the_runs_copies_fewer_kv_heads(kv_repeats, ranks):
    kv, repeats = kv_repeats
    heads = kv * repeats
    small, larger = divmod(heads, ranks)

    def copies(chosen: tuple[int, ...]) -> int:
        start, count = 0, 0
        for rank in range(ranks):
            stop = start + small + (rank in chosen)
            count += len({head // repeats for head in range(start, stop)})
            start = stop
        return count

    best = min(copies(chosen) for chosen in itertools.combinations(range(ranks), larger))
    assert HeadLayout(heads, kv, ranks).kv_copies == best


@pytest.mark.parametrize(
    ("heads", "kv", "ranks", "expected", "kind"),
    [
        (8, 8, 4, [2, 2, 2, 2], "even"),
        (8, 2, 4, [2, 2, 2, 2], "replicated"),
        (8, 1, 8, [1] * 8, "replicated"),
        (7, 7, 4, [2, 2, 2, 1], "uneven"),
        (10, 2, 4, [3, 2, 3, 2], "uneven"),
        (20, 20, 8, [3, 3, 3, 3, 2, 2, 2, 2], "uneven"),
        (3, 3, 5, [1, 1, 1, 0, 0], "uneven"),
    ],
)
def test_known_layouts(heads, kv, ranks, expected, kind):
    layout = HeadLayout(heads, kv, ranks)
    assert sizes(layout) == expected
    assert layout.kind == kind


def test_tensor_parallel_cuts_first():
    layout = HeadLayout(12, 12, 4, tensor_model_parallel_size=2)  # 12 % 4 == 0 says nothing
    assert sizes(layout) == [2, 2, 1, 1]
    assert HeadLayout(32, 2, 2, tensor_model_parallel_size=8).local_kv_heads == 1


def test_uneven_heads_refused_on_request():
    with pytest.raises(HeadDivisibilityError) as error:
        HeadLayout(40, 8, 4, 4, uneven_heads=False)
    text = str(error.value)
    assert "40 / 4 = 10 query and 8 / 4 -> 2 key/value heads" in text
    assert "ulysses_parallel_size 2 or 10 with tensor_model_parallel_size 4" in text
    assert "4 with tensor_model_parallel_size 2" in text
    assert "(3,2,3,2: 20% imbalance)" in text
    # What it offers works, by the same rule.
    HeadLayout(40, 8, 2, 4, uneven_heads=False)
    HeadLayout(40, 8, 10, 4, uneven_heads=False)
    HeadLayout(40, 8, 4, 2, uneven_heads=False)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [((10, 4, 1), "10 % 4 = 2"), ((12, 4, 2, 8), "12 % 8 = 4"), ((12, 4, 2, 3), "4 % 3 = 1")],
)
def test_heads_that_no_layout_takes(arguments, says):
    with pytest.raises(HeadDivisibilityError, match=says):
        HeadLayout(*arguments)


@pytest.mark.parametrize("arguments", [(0, 1, 1), (8, 0, 2), (8, 8, 0), (-8, 8, 2)])
def test_sizes_below_one_are_refused(arguments):
    with pytest.raises(HeadDivisibilityError, match="at least 1"):
        HeadLayout(*arguments)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 50), st.integers(1, 9), st.data())
def test_sharding_then_unsharding_is_the_identity(length, ranks, data):
    cuts = sorted(
        data.draw(st.lists(st.integers(0, length), min_size=ranks - 1, max_size=ranks - 1))
    )
    bounds = [0, *cuts, length]
    layouts = [
        SequenceLayout.contiguous(length, ranks),
        SequenceLayout.from_lengths([b - a for a, b in itertools.pairwise(bounds)]),
        SequenceLayout.zigzag(2 * ranks * length, ranks),
        SequenceLayout.zigzag_packed([0, 2 * ranks, 2 * ranks * (length + 1)], ranks),
    ]
    for layout in layouts:
        tokens = torch.arange(layout.sequence_length * 2).view(1, -1, 2)
        shards = [layout.shard(tokens, 1, rank) for rank in range(ranks)]
        assert [shard.size(1) for shard in shards] == list(layout.lengths)
        assert torch.equal(layout.unshard(shards, 1), tokens)
        for rank, shard in enumerate(shards):
            assert (shard[0, :, 0] // 2).tolist() == layout.token_indices(rank)


@pytest.mark.parametrize("shape", [(8,), (8, 3), (2, 8), (2, 8, 3)])
def test_negative_dims_are_those_from_the_end(shape):
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    dim = shape.index(8)
    for layout in (SequenceLayout.zigzag(8, 2), SequenceLayout.from_lengths([3, 0, 5])):
        ranks = range(layout.group_size)
        shards = [layout.shard(tensor, dim - len(shape), rank) for rank in ranks]
        for rank, shard in zip(ranks, shards, strict=True):
            assert torch.equal(shard, layout.shard(tensor, dim, rank))
        assert torch.equal(layout.unshard(shards, dim - len(shape)), tensor)


def test_zigzag_is_megatrons_order():
    assert SequenceLayout.zigzag(16, 2).token_indices(0) == [0, 1, 2, 3, 12, 13, 14, 15]
    assert SequenceLayout.zigzag(16, 2).token_indices(1) == [4, 5, 6, 7, 8, 9, 10, 11]


def test_contiguous_gives_the_longer_runs_first():
    assert SequenceLayout.contiguous(13, 4).lengths == (4, 3, 3, 3)
    assert SequenceLayout.contiguous(3, 4).lengths == (1, 1, 1, 0)


def test_what_is_no_layout_is_refused():
    with pytest.raises(
        ParallelConfigError, match=r"13 % \(2 x 4\) = 5[\s\S]*8 tokens or 16 tokens"
    ):
        SequenceLayout.zigzag(13, 4)
    with pytest.raises(ParallelConfigError, match="without gap or overlap"):
        SequenceLayout((((0, 4),), ((5, 8),)))
    with pytest.raises(ParallelConfigError, match="length -1"):
        SequenceLayout.from_lengths([4, -1])
    for arguments in [(8, 0), (8, -1), (8.0, 4), (8, 4.0), (8, True), (True, 2), (-8, 2), ("8", 2)]:
        for build in (SequenceLayout.contiguous, SequenceLayout.zigzag):
            with pytest.raises(ParallelConfigError, match=r"Nearest that work: an int"):
                build(*arguments)
    with pytest.raises(ParallelConfigError, match="starts at 0"):
        SequenceLayout.zigzag_packed([2, 10], 1)
    with pytest.raises(ParallelConfigError, match="0 ranks"):
        SequenceLayout.from_lengths([])
    for chunks in [
        (),
        None,
        ((0, 4),),
        (((0.0, 4.0),),),
        (((0, True),),),
        (((0,),),),
        (((4, 0),),),
    ]:
        with pytest.raises(ParallelConfigError, match="each rank of the group, one at least"):
            SequenceLayout(chunks)
    with pytest.raises(ParallelConfigError, match="7 tokens along dim 1"):
        SequenceLayout.contiguous(8, 2).shard(torch.zeros(1, 7), 1, 0)
