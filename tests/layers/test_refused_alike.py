"""What an attention would say of its options by itself, on ranks that hold no heads as on others.

Two heads over three ranks: the last holds none, and would wait for the others.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import run_ranks
from tests.support.wire import count_wire
from ulysses_mc import ParallelConfigError, SequenceLayout
from ulysses_mc.layers import UlyssesAttention
from ulysses_mc.layers.local import flash_attention, flex_attention, sdpa_attention

pytestmark = pytest.mark.filterwarnings("ignore:uneven")

B, S, HEADS, D, RANKS = 2, 6, 2, 4, 3
NAN, INF = float("nan"), float("inf")


def any_options(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any
) -> torch.Tensor:
    return value


WRONG: dict[str, list[Any]] = {
    "causal": [None, 1, torch.tensor(True)],
    "deterministic": [1, "yes"],
    "dropout_p": [1, 1.5, -0.1, NAN, INF, True, "0.1"],
    "scale": [0, NAN, INF, "1", True, torch.tensor(1.0)],
    "softcap": [0, -1.0, NAN, INF, torch.tensor(1.0)],
    "window": [(-3, -1), (0, -2), (1,), (1, 2, 3), (1.0, 0), (True, 0), 3, torch.tensor([1, 0])],
    "cu_seqlens": [
        [0.0, 6.0],
        [0, "6"],
        [[0, 6]],
        6,
        torch.tensor([0.0, 6.0]),
        torch.tensor([False, True]),
        torch.tensor([[0, 6], [0, 6]]),
        torch.empty(3, device="meta"),
    ],
    "alibi_slopes": [
        torch.ones(3),
        torch.ones(3, HEADS),
        torch.ones(1, 1, HEADS),
        torch.ones(HEADS, dtype=torch.long),
        torch.ones(HEADS, device="meta"),
        [0.5, 0.25],
    ],
    "sinks": [
        torch.ones(()),
        torch.ones(B, HEADS),
        torch.ones(HEADS, 1),
        torch.ones(HEADS, dtype=torch.bool),
        torch.ones(HEADS, device="meta"),
    ],
    "attention_mask": [
        torch.ones(S, S),
        torch.ones(S, S - 1).bool(),
        torch.ones(B + 1, 1, S, S).bool(),
        torch.ones(1, B, HEADS, S, S).bool(),
        torch.ones(S, S, device="meta").bool(),
        [True] * S,
    ],
    "attention_bias": [
        torch.ones(HEADS + 1, S, S),
        torch.ones(S, S).bool(),
        torch.ones(S, S, dtype=torch.int),
        torch.ones(S, S, dtype=torch.complex64),
        torch.ones(S, S, device="meta"),
    ],
}


def messages(attention: UlyssesAttention, calls: list[dict[str, Any]]) -> list[str]:
    tensors = [torch.zeros(B, S // RANKS, HEADS, D, requires_grad=True) for _ in range(3)]
    said = []
    for options in calls:
        with count_wire() as wire:
            try:
                attention(*tensors, **options)
            except ParallelConfigError as error:
                said.append(str(error))
            else:
                said.append(f"accepted {options}")
        assert wire.exchanges == 0, options
    return said


def wrong_values(name: str) -> list[str]:
    attention = UlyssesAttention(dist.group.WORLD, local_attention=any_options)
    return messages(attention, [{name: value} for value in WRONG[name]])


@pytest.mark.parametrize("name", WRONG)
def test_values_and_shapes(name) -> None:
    first, *others = run_ranks(RANKS, wrong_values, name)
    assert all(other == first for other in others)
    for message in first:
        assert name.removesuffix("_kv") in message and "Rule: " in message, message


def what_a_backend_cannot_do(local: str) -> str:
    attention = UlyssesAttention(
        dist.group.WORLD,
        local_attention={"flash": flash_attention, "flex": flex_attention}[local],
    )
    (message,) = messages(attention, [{}])
    return message


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
@pytest.mark.parametrize(("local", "says"), [("flash", "no GPU"), ("flex", "no backward pass")])
def test_backends(local, says) -> None:
    first, *others = run_ranks(RANKS, what_a_backend_cannot_do, local)
    assert says in first and "sdpa_attention" in first
    assert all(other == first for other in others)


def wider(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any) -> torch.Tensor:
    return torch.cat([value, value], -1)


def shorter(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any) -> torch.Tensor:
    return value[:, 1:]


def with_lse(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any) -> Any:
    return value, query.sum(-1)


def fails(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any) -> torch.Tensor:
    raise ParallelConfigError("This one never works.")


def run_other(local: Any) -> str:
    tensors = [torch.zeros(B, S // RANKS, HEADS, D, requires_grad=True) for _ in range(3)]
    with pytest.raises(ParallelConfigError) as error:
        UlyssesAttention(dist.group.WORLD, local_attention=local)(*tensors, causal=True)
    return str(error.value)


@pytest.mark.parametrize(
    ("local", "says"),
    [
        (wider, f"[{B}, {S}, 1, {2 * D}] for heads of this rank that need [{B}, {S}, 1, {D}]"),
        (shorter, f"[{B}, {S - 1}, 1, {D}]"),
        (with_lse, "a tuple"),
        (fails, "never works"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_a_local_attention_of_ones_own_returns_or_raises(local, says) -> None:
    for message in run_ranks(RANKS, run_other, local):
        assert says in message


def other_heads_than_given(heads: tuple[int | None, int | None]) -> list[str]:
    size = dist.get_world_size()
    attention = UlyssesAttention(dist.group.WORLD, num_heads=heads[0], num_kv_heads=heads[1])
    said = []
    for h, k in ((7, 7), (8, 4)):
        query, key = torch.zeros(1, 4 // size, h, D), torch.zeros(1, 4 // size, k, D)
        with pytest.raises(ParallelConfigError) as error:
            attention(query, key, key)
        said.append(str(error.value))
    return said


@pytest.mark.parametrize("ranks", [1, 2])
def test_heads_given_when_built_are_kept(ranks) -> None:
    for seven, four in run_ranks(ranks, other_heads_than_given, (8, None)):
        assert "num_heads=8) called with 7" in seven and "num_kv_heads=8) called with 4" in four
    for seven, four in run_ranks(ranks, other_heads_than_given, (None, 2)):
        assert "num_kv_heads=2) called with 7" in seven and "called with 4" in four


def another_length() -> str:
    size = dist.get_world_size()
    tensors = [torch.zeros(1, 4, 2, D) for _ in range(3)]
    attention = UlyssesAttention(dist.group.WORLD, SequenceLayout.contiguous(5 * size, size))
    with pytest.raises(ParallelConfigError, match="Its layout says 5 tokens") as error:
        attention(*tensors)
    return str(error.value)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_length_that_is_not_the_layouts(ranks) -> None:
    for rank, message in enumerate(run_ranks(ranks, another_length)):
        assert f"Rank {rank} of {ranks}" in message


def no_documents() -> None:
    size = dist.get_world_size()
    leaves = [torch.ones(1, S // size, HEADS, D, requires_grad=True) for _ in range(3)]
    whole = {
        "attention_bias": torch.ones(HEADS, S, S, requires_grad=True),
        "alibi_slopes": torch.ones(HEADS, requires_grad=True),
        "sinks": torch.ones(HEADS, requires_grad=True),
    }
    attention = UlyssesAttention(dist.group.WORLD, local_attention=sdpa_attention)
    out = attention(*leaves, cu_seqlens=[0], **whole)
    out.sum().backward()
    assert out.abs().max() == 0
    for leaf in (*leaves, *whole.values()):
        assert leaf.grad is not None and leaf.grad.abs().max() == 0


@pytest.mark.parametrize("ranks", [1, 3])
def test_no_documents_give_gradients_of_zeros(ranks) -> None:
    run_ranks(ranks, no_documents)
