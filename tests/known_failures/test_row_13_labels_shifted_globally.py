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
    assert shift_labels(IDS, cu_seqlens=cu).tolist() == [[-100, 3, *[-100] * 6]]


def test_padding_after_the_last_document_is_never_a_target() -> None:
    assert shift_labels(IDS, cu_seqlens=[0, 3, 6]).tolist() == [
        [2, 3, -100, 5, 6, -100, -100, -100]
    ]
    assert shift_labels(IDS.T, dim=0, cu_seqlens=[0, 7])[:, 0].tolist()[-2:] == [-100, -100]
    assert shift_labels(IDS, cu_seqlens=[0]).tolist() == [[-100] * 8]  # nothing but padding
    weights = torch.ones(1, 8)
    assert shift_labels(weights, cu_seqlens=[0, 6], ignore_index=0).sum() == 5


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool]
)
def test_a_type_that_cannot_hold_the_ignored_label_is_refused(dtype: torch.dtype) -> None:
    ids = IDS.to(dtype)
    with pytest.raises(ParallelConfigError) as refused:
        shift_labels(ids)
    for part in (str(dtype), "ignore_index=-100", "0 to", "torch.int64"):
        assert part in str(refused.value)
    assert torch.equal(shift_labels(ids.long())[0, :-1], ids[0, 1:].long())  # what it offers
    masked = shift_labels(ids, ignore_index=0)
    assert masked.dtype == dtype and masked.long().tolist()[0][-1] == 0


@pytest.mark.parametrize("value", [128, -129, 0.5, float("nan"), float("inf")])
def test_what_int8_does_not_hold_is_refused(value: float) -> None:
    with pytest.raises(ParallelConfigError, match="whole numbers from -128 to 127"):
        shift_labels(IDS.to(torch.int8), ignore_index=value)
    assert shift_labels(IDS.to(torch.int8), ignore_index=-128)[0, -1] == -128


def test_floats_hold_what_is_in_their_range() -> None:
    with pytest.raises(ParallelConfigError, match=r"-65504.0 to 65504.0[\s\S]*float32"):
        shift_labels(IDS.half(), ignore_index=1e6)
    assert shift_labels(IDS.half(), ignore_index=float("nan"))[0, -1].isnan()
    assert shift_labels(IDS.bfloat16())[0, -1] == -100
    weights = torch.arange(8.0, requires_grad=True)
    shift_labels(weights, ignore_index=0).sum().backward()
    assert weights.grad is not None and weights.grad.tolist() == [0, *[1] * 7]


@pytest.mark.parametrize(("tokens", "dim"), [(torch.tensor(3), -1), (IDS, 2), (IDS, -3)])
def test_a_dim_that_is_not_there_is_refused(tokens: torch.Tensor, dim: int) -> None:
    with pytest.raises(ParallelConfigError, match=rf"along dim {dim}\."):
        shift_labels(tokens, dim=dim)


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
