"""Row 30: an error tells nothing: neither the numbers nor the rule nor what would work."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import run_ranks
from ulysses_mc import HeadLayout, ParallelConfigError, SequenceLayout, shard_batch
from ulysses_mc.parallel_state import ParallelConfig, RankGrid

ROOT = Path(__file__).resolve().parents[2]


def batch_identity(total: int) -> None:
    """16 ranks as tp 2 x ulysses 2 x dp 4, micro batches of 2."""
    from examples.pretraining.preflight import accumulation_steps

    config = ParallelConfig(tensor_model_parallel_size=2, ulysses_parallel_size=2)
    accumulation_steps(RankGrid(config, 16), 2, total, "batch")


def ranks(world: int) -> None:
    RankGrid(ParallelConfig(tensor_model_parallel_size=2, ulysses_parallel_size=4), world)


# What is wrong, its numbers, and how to take each of the settings that the error names.
CASES: list[tuple[Callable[..., Any], tuple[Any, ...], list[str], list[tuple[Any, ...]]]] = [
    (batch_identity, (12,), ["12", "micro_batch_size 2", "size 4", "12 / 8", "8 or 16"],
     [(8,), (16,)]),
    (ranks, (12,), ["12 ranks", "8 or 16"], [(8,), (16,)]),
    (SequenceLayout.zigzag, (30, 4), ["30", "30 % (2 x 4) = 6", "24 tokens or 32 tokens"],
     [(24, 4), (32, 4)]),
    (lambda k, p: HeadLayout(40, k, p, 4, uneven_heads=False), (8, 4),
     ["40 query heads", "8 key/value heads", "=4 x ulysses_parallel_size=4", "40 / 4 = 10",
      "ulysses_parallel_size 2 or 10"], [(8, 2), (8, 10)]),
]  # fmt: skip


@pytest.mark.parametrize(("make", "wrong", "parts", "works"), CASES, ids=range(len(CASES)))
def test_numbers_rule_and_what_works(
    make: Callable[..., Any],
    wrong: tuple[Any, ...],
    parts: list[str],
    works: list[tuple[Any, ...]],
) -> None:
    with pytest.raises(ParallelConfigError) as refused:
        make(*wrong)
    message = str(refused.value)
    assert refused.value.rule and "Nearest that work" in message
    for part in parts:
        assert part in message
    for setting in works:
        make(*setting)


def test_a_batch_entry_is_named_with_its_lengths() -> None:
    batch = {"tokens": torch.zeros(1, 16), "temperatures": torch.zeros(1, 5)}
    with pytest.raises(ParallelConfigError) as refused:
        shard_batch(batch, SequenceLayout.contiguous(16, 2), 0)
    for part in ("'temperatures'", "[1, 5]", "16", "this rank 8", "whole=('temperatures',)"):
        assert part in str(refused.value)


def refuse_what_the_backend_cannot() -> str:
    from ulysses_mc.layers import UlyssesAttention

    tensors = [torch.zeros(1, 2, 4, 8) for _ in range(3)]
    with pytest.raises(ParallelConfigError) as refused:
        UlyssesAttention(dist.group.WORLD)(*tensors, softcap=30.0)
    return str(refused.value)


def test_a_backends_refusal_names_the_backends_that_can() -> None:
    for message in run_ranks(2, refuse_what_the_backend_cannot):
        assert "sdpa_attention with softcap" in message
        assert "flash_attention or flex_attention" in message


def test_every_refusal_of_the_library_states_its_rule() -> None:
    silent = []
    for folder in ("ulysses_mc", "layers", "parallel_state"):
        for path in (ROOT / folder).rglob("*.py"):
            for call in ast.walk(ast.parse(path.read_text())):
                if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
                    continue
                if call.func.id not in ("ParallelConfigError", "HeadDivisibilityError"):
                    continue
                given = len(call.args) >= 3 or any(isinstance(a, ast.Starred) for a in call.args)
                if not given and all(k.arg != "rule" for k in call.keywords):
                    silent.append(f"{path.relative_to(ROOT)}:{call.lineno}")
    assert silent == []
