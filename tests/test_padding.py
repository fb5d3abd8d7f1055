"""pad_documents, and what shard_batch makes of its result on every rank."""

from __future__ import annotations

import pytest
import torch

from ulysses_mc import ParallelConfigError, SequenceLayout, pad_documents, shard_batch


def batch() -> dict[str, object]:
    return {
        "tokens": torch.arange(1, 10)[None],
        "labels": torch.arange(2, 11)[None],
        "loss_mask": torch.ones(1, 9),
        "position_ids": torch.arange(9)[None],
        "cu_seqlens": torch.tensor([0, 3, 4, 9], dtype=torch.int32),
        "max_seqlen": torch.tensor([5]),
        "name": "packed",
    }


def test_every_document_is_padded_by_itself() -> None:
    padded = pad_documents(batch(), 4)
    assert padded["tokens"].tolist() == [[1, 2, 3, 0, 4, 0, 0, 0, 5, 6, 7, 8, 9, 0, 0, 0]]
    assert padded["labels"][0, [3, 5, 15]].tolist() == [-100] * 3
    assert padded["loss_mask"].sum() == 9
    assert padded["cu_seqlens"].tolist() == [0, 3, 4, 9]
    assert padded["cu_seqlens_padded"].tolist() == [0, 4, 8, 16]
    assert padded["max_seqlen"].tolist() == [5] and padded["name"] == "packed"


def test_what_is_filled_in_can_be_chosen() -> None:
    assert pad_documents(batch(), 2, values={"tokens": 7})["tokens"][0, 3] == 7


def test_nothing_to_pad() -> None:
    padded = pad_documents({"x": torch.ones(8), "cu_seqlens": [0, 8]}, 4, dim=0)
    assert padded["x"].shape == (8,) and padded["cu_seqlens_padded"].tolist() == [0, 8]


def test_a_tensor_of_another_length_is_named() -> None:
    with pytest.raises(ParallelConfigError, match="'loss_mask' of shape"):
        pad_documents(batch() | {"loss_mask": torch.ones(1, 5)}, 4)


def test_every_rank_has_the_documents_and_its_own_positions() -> None:
    whole = pad_documents(batch(), 4)
    layout = SequenceLayout.zigzag_packed(whole["cu_seqlens_padded"].tolist(), 2)
    ranks = [shard_batch(whole, layout, rank) for rank in range(2)]
    for rank in ranks:
        assert rank.keys() == {*batch(), "cu_seqlens_padded"}
        assert rank["cu_seqlens"].tolist() == [0, 3, 4, 9]
        assert rank["cu_seqlens_padded"].tolist() == [0, 4, 8, 16]
    assert ranks[0]["position_ids"].tolist() == [[0, 3, 0, 3, 0, 1, 6, 7]]
    assert ranks[1]["position_ids"].tolist() == [[1, 2, 1, 2, 2, 3, 4, 5]]
    assert ranks[0]["tokens"].tolist() == [[1, 0, 4, 0, 5, 6, 0, 0]]
    assert ranks[0]["loss_mask"].tolist() == [[1, 0, 1, 0, 1, 1, 0, 0]]
