"""Row 19: a window, mask or bias is silently widened to plain causal attention."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.oracle import attention
from tests.support.pool import run_ranks
from tests.support.sharded import check_against_oracle, draw, draw_qkv
from tests.support.wire import count_wire
from ulysses_mc import ParallelConfigError, SequenceLayout
from ulysses_mc.layers import UlyssesAttention

S, HEADS = 8, 8  # equal on purpose: a mask's dim must not be taken for another


def some_pairs(*shape: int, seed: int = 0) -> torch.Tensor:
    """A mask in which the second query sees nothing."""
    allowed = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) > 0.4
    if len(shape) > 1 and shape[-2] > 1:
        allowed[..., 1, :] = False
    return allowed


@pytest.mark.parametrize("window", [(2, 0), (1, 1), (-1, 2), (0, 0), (2, -1)])
@pytest.mark.parametrize("causal", [False, True])
def test_window(window, causal) -> None:
    check_against_oracle(2, draw_qkv(1, S, 4, 2), window=window, causal=causal)


def two_layers(tensors: tuple[torch.Tensor, ...], windows: list[tuple[int, int] | None]):
    layout = SequenceLayout.contiguous(S, dist.get_world_size())
    x, key, value = (layout.shard(tensor, 1, dist.get_rank()) for tensor in tensors)
    attend = UlyssesAttention(dist.group.WORLD)
    for window in windows:
        x = attend(x, key, value, causal=True, window=window)
    return x


def test_windows_per_layer() -> None:
    tensors, windows = draw_qkv(1, S, 4, 4), [(2, 0), None, (1, 0)]
    expected = tensors[0]
    for window in windows:
        expected = attention(expected, *tensors[1:], causal=True, window=window)
    actual = torch.cat(run_ranks(2, two_layers, tensors, windows), 1)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


SHAPES = [
    (S,),
    (S, S),
    (1, S),
    (HEADS, S, S),
    (1, S, S),
    (2, 1, 1, S),
    (2, 1, S, S),
    (2, HEADS, S, S),
    (1, HEADS, 1, S),
    (2, HEADS, S, 1),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_boolean_mask_of_any_shape(shape) -> None:
    whole = check_against_oracle(2, draw_qkv(2, S, HEADS, 4), attention_mask=some_pairs(*shape))
    if len(shape) > 1 and shape[-2] > 1:  # the query that sees nothing
        assert whole["out"][:, 1].abs().max() == 0 and whole["query"][:, 1].abs().max() == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_bias_of_any_shape_and_its_gradient(shape) -> None:
    check_against_oracle(4, draw_qkv(2, S, HEADS, 4), attention_bias=draw(*shape), causal=True)


def refused(name: str, tensor: torch.Tensor) -> tuple[str, int]:
    local = [torch.zeros(2, S // 2, HEADS, 4) for _ in range(3)]
    with count_wire() as wire, pytest.raises(ParallelConfigError) as error:
        UlyssesAttention(dist.group.WORLD)(*local, **{name: tensor})
    return str(error.value), wire.exchanges


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("attention_mask", torch.ones(S // 2, S).bool(), "[2, 8, 8, 8]"),  # cut with the tokens
        ("attention_bias", torch.ones(2, HEADS // 2, S, S), "[2, 8, 8, 8]"),  # with the heads
        ("attention_mask", torch.ones(S, S), "attention_mask of dtype torch.float32"),
        ("alibi_slopes", torch.ones(HEADS // 2), "8 query heads"),
        ("cu_seqlens", [0, 3, 9], "8 tokens"),
        ("softcap", torch.tensor(5.0), "flex_attention"),
        ("made_up", torch.tensor(5.0), "a callable of yours that takes it"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_collective(name, tensor, words) -> None:
    for message, exchanges in run_ranks(2, refused, name, tensor):
        assert name in message and words in message
        assert exchanges == 0
