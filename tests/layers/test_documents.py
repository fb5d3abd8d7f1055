"""Packed documents by their positions, and that none sees another or the padding."""

from __future__ import annotations

import pytest
import torch

from tests.support.pool import run_ranks
from tests.support.sharded import attend_on_rank, check_against_oracle, draw, draw_qkv, whole
from ulysses_mc import ParallelConfigError, SequenceLayout, cu_seqlens_from_position_ids


@pytest.mark.parametrize(
    ("positions", "valid", "right"),
    [
        ([0, 1, 2, 3], None, [0, 4]),
        ([0, 1, 2, 0, 1, 2, 3, 4, 0, 0, 1], None, [0, 3, 8, 9, 11]),
        ([0, 0, 0, 0], None, [0, 1, 2, 3, 4]),  # one token each
        ([5, 6, 7, 2, 3], None, [0, 3, 5]),  # a document may go on from an earlier window
        ([0, 1, 0, 0, 0], [1, 1, 0, 0, 0], [0, 2]),  # padding at the end
        ([0, 1, 2, 3, 4], [1, 1, 1, 0, 0], [0, 3]),  # whose positions go on
        ([1, 1, 0, 1, 2], [0, 0, 1, 1, 1], [0, 2, 5]),  # padding on the left, apart
        ([0, 1, 0, 0, 0, 1], [1, 1, 0, 0, 1, 1], [0, 2, 4, 6]),
        ([0, 0, 0], [0, 0, 0], [0]),  # nothing but padding
        ([0], None, [0, 1]),
    ],
)
def test_boundaries_from_positions(positions, valid, right) -> None:
    position_ids = torch.tensor(positions)
    valid = None if valid is None else torch.tensor(valid)
    for rows in (position_ids, position_ids[None], position_ids.expand(3, -1)):
        cu = cu_seqlens_from_position_ids(rows, valid)
        assert cu.tolist() == right and cu.dtype == torch.int32


def test_rows_with_different_documents_are_refused() -> None:
    rows = torch.tensor([[0, 1, 0, 1], [0, 1, 2, 0]])
    with pytest.raises(ParallelConfigError, match="2 rows with different documents"):
        cu_seqlens_from_position_ids(rows)
    with pytest.raises(ParallelConfigError, match="whole sequence"):
        cu_seqlens_from_position_ids(rows, torch.ones(2, 3))


@pytest.mark.parametrize(
    ("positions", "says"),
    [
        (torch.tensor([False, True, False]), "torch.bool is no type of positions"),
        (torch.arange(300).bfloat16(), "torch.bfloat16 rounds positions above 256"),
        (torch.arange(3.0), "torch.float32 rounds positions above 16777216"),
        (torch.arange(3, device="meta"), "meta device holds no values"),
        (torch.tensor(1), "without dims has no tokens"),
        (torch.zeros(1, 0).long(), r"shape \[1, 0\][\s\S]*no position at all: 1 x 0 = 0"),
        (torch.zeros(0, 5).long(), r"shape \[0, 5\][\s\S]*no position at all: 0 x 5 = 0"),
    ],
)
def test_what_holds_no_positions_is_refused(positions: torch.Tensor, says: str) -> None:
    with pytest.raises(ParallelConfigError, match=says):
        cu_seqlens_from_position_ids(positions)


def test_a_validity_without_tokens_is_refused() -> None:
    with pytest.raises(ParallelConfigError, match="whole sequence"):
        cu_seqlens_from_position_ids(torch.arange(3), torch.tensor(1))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.uint16])
def test_positions_of_every_integer_type(dtype: torch.dtype) -> None:
    positions = torch.tensor([*range(200, 256), 0, 1, 0])
    assert cu_seqlens_from_position_ids(positions.to(dtype)).tolist() == [0, 56, 58, 59]


POSITIONS = torch.tensor([0, 1, 2, 0, 0, 1, 2, 3, 0, 1, 0, 0, 0])
VALID = torch.tensor([1] * 10 + [0] * 3)
CU = [0, 3, 4, 8, 10]  # and three tokens of padding
LAYOUT = SequenceLayout.contiguous(13, 4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("batch", [None, 2])
def test_attention_within_documents_and_none_in_padding(batch, causal) -> None:
    tensors = draw_qkv(batch or 1, 13, 4, 2)
    if batch is None:
        tensors = tuple(tensor[0] for tensor in tensors)
    cu = cu_seqlens_from_position_ids(POSITIONS, VALID)
    assert cu.tolist() == CU
    real = VALID.bool()[:, None]
    # The mask changes nothing but what the oracle says of padding: it takes it for a document.
    together = check_against_oracle(
        4, tensors, LAYOUT, cu_seqlens=cu, causal=causal, attention_mask=real
    )
    assert together["out"].narrow(-3, 10, 3).abs().max() == 0


def results(tensors: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    grad = draw(13, 4, 4, seed=9)
    parts = run_ranks(4, attend_on_rank, tensors, grad, LAYOUT, cu_seqlens=CU, causal=True)
    return whole(parts, LAYOUT)


@pytest.mark.parametrize(("start", "stop"), [(3, 4), (4, 8), (10, 13)])
def test_a_document_or_padding_changes_the_others_by_exactly_0(start, stop) -> None:
    tensors = tuple(t[0] for t in draw_qkv(1, 13, 4, 2))
    changed = tuple(tensor.clone() for tensor in tensors)
    for tensor in changed:
        tensor[start:stop] += 1
    before, after = results(tensors), results(changed)
    for name in before:
        difference = (after[name] - before[name]).abs()
        assert difference[:start].sum() == 0 and difference[stop:].sum() == 0
