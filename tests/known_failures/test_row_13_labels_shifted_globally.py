"""Row 13: labels shifted inside each shard lose a target per shard (contiguous layouts)."""

from __future__ import annotations

import pytest
import torch

from ulysses_mc import ParallelConfigError, SequenceLayout, shard_batch, shift_labels

IDS = torch.arange(1, 9)[None]


def shards(labels: torch.Tensor, layout: SequenceLayout) -> list[list[int]]:
    ranks = range(layout.group_size)
    return [shard_batch({"labels": labels}, layout, r)["labels"][0].tolist() for r in ranks]


def test_shift_then_cut() -> None:
    assert shards(shift_labels(IDS), SequenceLayout.contiguous(8, 2)) == [
        [2, 3, 4, 5],
        [6, 7, 8, -100],
    ]
    assert IDS.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]


def test_two_documents_of_four_have_six_targets() -> None:
    labels = shift_labels(IDS, cu_seqlens=[0, 4, 8])
    assert labels.tolist() == [[2, 3, 4, -100, 6, 7, 8, -100]]
    assert shards(labels, SequenceLayout.zigzag(8, 2)) == [[2, 3, 8, -100], [4, -100, 6, 7]]
    assert int((labels != -100).sum()) == 6


@pytest.mark.parametrize("cu", [torch.tensor([[0, 1, 1, 3]]), [0, 1, 3]])
def test_one_token_documents_and_padding(cu) -> None:
    assert shift_labels(IDS, cu_seqlens=cu).tolist() == [[-100, 3, -100, 5, 6, 7, 8, -100]]


def test_weights_of_predicted_tokens_shift_alike() -> None:
    weights = torch.tensor([[0, 0, 1, 1], [0.5, 1, 1, 1]])
    assert shift_labels(weights, ignore_index=0).tolist() == [[0, 1, 1, 0], [1, 1, 1, 0]]


def test_packed_and_other_dims() -> None:
    packed = shift_labels(IDS[0], cu_seqlens=[0, 5, 8])
    assert packed.tolist() == [2, 3, 4, 5, -100, 7, 8, -100]
    assert torch.equal(shift_labels(IDS.T, dim=0), shift_labels(IDS).T)
    assert shift_labels(torch.empty(2, 0).long()).shape == (2, 0)


def test_a_shard_with_global_boundaries_is_refused() -> None:
    with pytest.raises(ParallelConfigError, match="4 tokens"):
        shift_labels(IDS[:, :4], cu_seqlens=[0, 4, 8])
