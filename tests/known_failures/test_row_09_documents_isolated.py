"""Row 9: packed documents see each other, for instance when a mask of ones is given as well."""

from __future__ import annotations

import pytest
import torch

from tests.support.pool import run_ranks
from tests.support.sharded import attend_on_rank, check_against_oracle, draw, draw_qkv, whole
from ulysses_mc import SequenceLayout

CU = [0, 3, 8, 9, 16]
LAYOUT = SequenceLayout.contiguous(16, 4)
OPTIONS = {"cu_seqlens": CU, "causal": True, "attention_mask": torch.ones(16, 16).bool()}


def results(tensors: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    grad = draw(16, 4, 4, seed=9)
    return whole(run_ranks(4, attend_on_rank, tensors, grad, LAYOUT, **OPTIONS), LAYOUT)


@pytest.mark.parametrize("document", range(4))
def test_a_document_changes_the_others_by_exactly_0(document) -> None:
    start, stop = CU[document : document + 2]
    tensors = tuple(t[0] for t in draw_qkv(1, 16, 4, 2))
    changed = tuple(tensor.clone() for tensor in tensors)
    for tensor in changed:
        tensor[start:stop] += 1
    before, after = results(tensors), results(changed)
    for name in before:
        difference = (after[name] - before[name]).abs()
        assert name != "out" or difference[start:stop].max() > 0
        assert difference[:start].sum() == 0 and difference[stop:].sum() == 0


@pytest.mark.parametrize("mask", [None, torch.ones(16, 16).bool(), torch.ones(16).bool()])
@pytest.mark.parametrize("causal", [False, True])
def test_boundaries_win_over_a_mask_of_ones(mask, causal) -> None:
    options = {"attention_mask": mask} if mask is not None else {}
    check_against_oracle(4, draw_qkv(2, 16, 4, 2), cu_seqlens=CU, causal=causal, **options)


def test_a_mask_restricts_documents_further() -> None:
    mask = torch.rand(16, 16, generator=torch.Generator().manual_seed(0)) > 0.4
    check_against_oracle(4, draw_qkv(2, 16, 4, 2), cu_seqlens=CU, attention_mask=mask)
