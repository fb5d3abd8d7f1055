"""Row 10: positions restart in every shard, or do not restart at document starts."""

from __future__ import annotations

import pytest
import torch

from ulysses_mc import ParallelConfigError, SequenceLayout, shard_batch, shift_labels


def positions(layout: SequenceLayout, cu: list[int] | torch.Tensor | None, key: str) -> list:
    tokens = torch.zeros(3, layout.sequence_length)
    batch = {"tokens": tokens} if cu is None else {"tokens": tokens, key: torch.as_tensor(cu)}
    made = [shard_batch(batch, layout, r)["position_ids"] for r in range(layout.group_size)]
    assert all(p.dtype == torch.long and p.shape[0] == 3 for p in made)
    assert all(torch.equal(p, p[:1].expand(3, -1)) for p in made)
    return [p[0].tolist() for p in made]


@pytest.mark.parametrize("key", ["cu_seqlens", "cu_seqlens_q"])
@pytest.mark.parametrize(
    ("s", "ranks", "cu", "right"),
    [
        (8, 2, None, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (8, 2, [0, 4, 8], [[0, 1, 2, 3], [0, 1, 2, 3]]),
        (16, 4, [0, 3, 8, 9, 16], [[0, 1, 2, 0], [1, 2, 3, 4], [0, 0, 1, 2], [3, 4, 5, 6]]),
        (13, 4, [0, 13], [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]),
        (8, 2, [0, 3, 6], [[0, 1, 2, 0], [1, 2, 0, 1]]),  # two tokens of padding
        (8, 2, [0, 4, 8, 8, 8], [[0, 1, 2, 3], [0, 1, 2, 3]]),  # filled up to a fixed length
        (8, 2, [[0, 4, 8]], [[0, 1, 2, 3], [0, 1, 2, 3]]),  # [1, documents + 1]
        (3, 4, None, [[0], [1], [2], []]),
    ],
)
def test_positions_count_from_the_document(s, ranks, cu, right, key) -> None:
    assert positions(SequenceLayout.contiguous(s, ranks), cu, key) == right


def test_zigzag_positions_are_those_of_its_tokens() -> None:
    layout = SequenceLayout.zigzag(8, 2)
    assert positions(layout, None, "cu_seqlens") == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert positions(layout, [0, 7, 8], "cu_seqlens") == [[0, 1, 6, 0], [2, 3, 4, 5]]


def test_given_positions_are_cut_like_the_tokens() -> None:
    layout = SequenceLayout.zigzag(8, 2)
    given = torch.arange(8).flip(0)[None]
    batch = {"tokens": torch.zeros(1, 8), "position_ids": given, "cu_seqlens": torch.tensor([0, 8])}
    assert shard_batch(batch, layout, 1)["position_ids"].tolist() == [[5, 4, 3, 2]]


@pytest.mark.parametrize("cu", [[1, 8], [0, 5, 3, 8], [0, 9], []])
def test_boundaries_that_do_not_fit_are_refused(cu: list[int]) -> None:
    with pytest.raises(ParallelConfigError, match=r"8 tokens|whole numbers of tokens"):
        positions(SequenceLayout.contiguous(8, 2), cu, "cu_seqlens")


@pytest.mark.parametrize(
    ("cu", "says"),
    [
        ((n for n in [0, 8]), "generator"),
        (iter([0, 8]), "iterator"),
        (torch.tensor([0, 8], device="meta"), "meta device, which holds no values"),
        (torch.tensor([0.0, 8.0]), "torch.float32"),
        (8, "cu_seqlens is 8"),
    ],
)
def test_boundaries_that_cannot_be_read_are_refused(cu, says) -> None:
    batch = {"tokens": torch.zeros(1, 8), "cu_seqlens": cu}
    with pytest.raises(ParallelConfigError, match=rf"{says}[\s\S]*a list of ints"):
        shard_batch(batch, SequenceLayout.contiguous(8, 2), 0)
    with pytest.raises(ParallelConfigError, match=says):
        shift_labels(batch["tokens"], cu_seqlens=cu)


def test_boundaries_of_any_sequence() -> None:
    layout = SequenceLayout.contiguous(8, 2)
    for cu in ((0, 3, 8), range(0, 9, 4), torch.tensor([0, 3, 8]).numpy()):
        given = {"tokens": torch.zeros(1, 8), "cu_seqlens": cu}
        right = {"tokens": torch.zeros(1, 8), "cu_seqlens": list(cu)}
        assert torch.equal(
            shard_batch(given, layout, 1)["position_ids"],
            shard_batch(right, layout, 1)["position_ids"],
        )
