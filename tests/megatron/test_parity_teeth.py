"""Mutations of the library and of Megatron's RoPE under which parity with one rank must fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.layers.test_teeth import last_replica_only
from tests.megatron import test_parity as parity
from tests.support.pool import run_ranks
from ulysses_mc import SequenceLayout

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(torch.cuda.is_available(), reason="compares CPU ranks"),
]
pytest.importorskip("megatron.core")


def positions_restart() -> Any:
    from megatron.core.models.common.embeddings import rotary_pos_embedding

    def first_positions(embedding: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
        return embedding.narrow(dim, 0, embedding.size(dim) // group.size())

    return patch.object(rotary_pos_embedding, "get_pos_emb_on_this_cp_rank", first_positions)


def contiguous_order() -> Any:
    from ulysses_mc.layers import core_attention

    return patch.object(core_attention, "_zigzag", SequenceLayout.contiguous)


def tensor_parallel_group() -> Any:
    from megatron.core import parallel_state

    from ulysses_mc.layers import core_attention

    def group(pg_collection: Any) -> Any:
        return parallel_state.get_tensor_model_parallel_group()

    return patch.object(core_attention, "_context_group", group)


def train_mutated(setting: Any, mutation: Callable[[], Any]) -> list[parity.Step]:
    with mutation(), patch.object(parity, "STEPS", 1):
        return parity.train(setting, "sdpa")


@pytest.mark.parametrize(
    ("mutation", "name"),
    [
        (positions_restart, "ulysses4-replicated-kv"),
        (last_replica_only, "ulysses4-replicated-kv"),
        (contiguous_order, "ulysses4-replicated-kv"),
        (tensor_parallel_group, "tp2-ulysses2"),
    ],
)
def test_a_mutation_turns_parity_red(mutation: Callable[[], Any], name: str) -> None:
    setting = parity.SETTINGS[name]
    steps = run_ranks(setting.tp * setting.cp, train_mutated, setting, mutation, timeout=240)
    with pytest.raises(AssertionError, match="step 0: "):
        for found in steps:
            parity.assert_same(parity.reference(name)[:1], found)
