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


def test_padding_after_the_last_document_holds_what_is_filled_in() -> None:
    given = batch() | {"cu_seqlens": [0, 3, 4, 6]}
    padded = pad_documents(given, 4, values={"tokens": 50})
    assert padded["tokens"].tolist() == [[1, 2, 3, 50, 4, 50, 50, 50, 5, 6, *[50] * 6]]
    assert padded["labels"][0, 8:].tolist() == [6, 7, *[-100] * 6]
    assert padded["loss_mask"].sum() == 6
    assert padded["cu_seqlens"].tolist() == [0, 3, 4, 6, 9]
    assert padded["cu_seqlens_padded"].tolist() == [0, 4, 8, 12, 16]


def test_a_negative_dim_counts_from_the_end_of_each_tensor() -> None:
    given = batch()
    padded, same = pad_documents(given, 4, dim=-1), pad_documents(given, 4)
    assert all(torch.equal(padded[n], same[n]) for n in ("tokens", "labels", "loss_mask"))
    packed = pad_documents({"tokens": torch.arange(9), "cu_seqlens": [0, 9]}, 4, dim=-1)
    assert packed["tokens"].shape == (12,)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.uint16, torch.uint32])
def test_a_type_that_cannot_hold_the_padding_is_named(dtype: torch.dtype) -> None:
    labels = batch()["labels"].to(dtype)
    with pytest.raises(ParallelConfigError, match=rf"'labels' of {dtype}, padded with -100"):
        pad_documents(batch() | {"labels": labels}, 4)
    padded = pad_documents(batch() | {"labels": labels}, 4, values={"labels": 0})
    assert padded["labels"].dtype == dtype and int(padded["labels"][0, 3]) == 0


@pytest.mark.parametrize("multiple", [0, -4, 2.0, True, None])
def test_a_multiple_that_is_no_count_is_refused(multiple) -> None:
    with pytest.raises(ParallelConfigError, match=rf"multiple is {multiple}[\s\S]*1 or more"):
        pad_documents(batch(), multiple)


@pytest.mark.parametrize("boundaries", [{}, {"cu_seqlens": None}])
def test_a_batch_without_boundaries_is_refused(boundaries: dict[str, None]) -> None:
    with pytest.raises(ParallelConfigError, match=r"without cu_seqlens[\s\S]*\[0, t\]"):
        pad_documents({"tokens": torch.zeros(1, 9)} | boundaries, 4)


def test_documents_are_padded_once() -> None:
    with pytest.raises(ParallelConfigError, match="padded once"):
        pad_documents(pad_documents(batch(), 4), 4)


@pytest.mark.parametrize("first", [False, True])
def test_an_entry_without_the_token_dim_is_named(first: bool) -> None:
    one = {"sample_ids": torch.zeros(1)}
    given = one | batch() if first else batch() | one
    with pytest.raises(ParallelConfigError, match=r"'sample_ids' of shape \[1\][\s\S]*whole=\("):
        pad_documents(given, 4)
    assert pad_documents(given, 4, whole=("sample_ids",))["sample_ids"].shape == (1,)


def test_options_for_entries_that_are_not_there_are_refused() -> None:
    with pytest.raises(ParallelConfigError, match=r"values names 'token'[\s\S]*work: 'tokens'"):
        pad_documents(batch(), 4, values={"token": 1})
    with pytest.raises(ParallelConfigError, match="whole names 'seeds'"):
        pad_documents(batch(), 4, whole=("seeds",))
