"""A GPT with Megatron's TEDotProductAttention between the exchanges, trained, equals one rank."""

from __future__ import annotations

import pytest
import torch

from tests.megatron.test_dropout import attention_masks
from tests.megatron.test_parity import SETTINGS, assert_same, reference, train
from tests.support.pool import run_ranks

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(torch.cuda.is_available(), reason="compares CPU ranks"),
]
TE = "TEDotProductAttention"


@pytest.mark.parametrize("name", ["tp2-ulysses2", "sinks-window-tp2-ulysses2"])
def test_equals_one_rank(name: str) -> None:
    setting = SETTINGS[name]
    for steps in run_ranks(setting.tp * setting.cp, train, setting, TE, timeout=240):
        assert_same(reference(name), steps)


def test_row_11_attention_masks() -> None:
    """Its dropout draws from Megatron's tracker: other masks on every rank, the states equal."""
    run_ranks(4, attention_masks, TE)
