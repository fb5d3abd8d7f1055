"""Row 14: with Megatron's sequence_parallel, norm gradients are not summed over tensor ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.megatron.small_gpt import Setting
from tests.megatron.test_parity import assert_same, train
from tests.support.pool import run_ranks

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(torch.cuda.is_available(), reason="compares CPU ranks"),
]
pytest.importorskip("megatron.core")


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_every_gradient_is_that_of_one_rank(kv_heads: int) -> None:
    """Gradients of norms are also compared between the tensor-parallel ranks on the way."""
    config = {"num_attention_heads": 8, "num_query_groups": kv_heads, "qk_layernorm": True}
    setting = Setting(tp=2, cp=2, config=config | {"sequence_parallel": True})
    (right,) = run_ranks(1, train, replace(setting, tp=1, cp=1, config=config), "stock")
    assert any("q_layernorm" in name for name in right[0][2])
    for steps in run_ranks(4, train, setting, "sdpa", timeout=120):
        assert_same(right, steps)
