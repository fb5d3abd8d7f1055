"""Ulysses around TransformerEngine's own attention module, against attention in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.megatron.test_core_attention import Case, check_core
from tests.support.pool import run_ranks

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(torch.cuda.is_available(), reason="compares CPU ranks in float64"),
]
pytest.importorskip("megatron.core")

TE = "TEDotProductAttention"
KINDS = {"mha": (8, 8), "gqa": (8, 4), "replicated-kv": (8, 2), "uneven": (12, 6), "one-kv": (6, 1)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (1, 4), (2, 2), (2, 4)])
@pytest.mark.filterwarnings("ignore:uneven")
def test_heads(kind: str, tp: int, cp: int) -> None:
    heads, kv_heads = KINDS[kind]
    case = Case(tp, cp, heads, max(kv_heads, tp), TE)  # Megatron hands out at least tp groups
    run_ranks(case.ranks, check_core, case)


OPTIONS: list[dict[str, Any]] = [
    dict(mask_type="no_mask"),
    dict(window=(3, 0)),
    dict(bias=True),
    dict(bias=True, mask_type="no_mask"),
    dict(sinks=True, tolerance=1e-6),  # TransformerEngine takes them in float32
    dict(sinks=True, window=(3, 0), tolerance=1e-6),
    dict(off_by_one=True, tolerance=1e-6),
    dict(mask="whole", mask_type="arbitrary"),
    dict(mask="rows", mask_type="arbitrary"),
    dict(value_dim=3),
]


@pytest.mark.parametrize(
    ("tp", "cp", "heads", "kv_heads"),
    [(1, 2, 8, 4), (2, 2, 8, 2), (1, 4, 12, 6), (2, 4, 12, 6)],
    ids=["even", "tp-replicated-kv", "irregular", "tp-uneven"],
)
@pytest.mark.filterwarnings("ignore:uneven")
def test_options(tp: int, cp: int, heads: int, kv_heads: int) -> None:
    cases = [
        Case(tp, cp, heads, heads if "value_dim" in options else kv_heads, TE, **options)
        for options in OPTIONS
    ]
    run_ranks(tp * cp, check_core, *cases)
