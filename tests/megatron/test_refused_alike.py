"""What a core attention would refuse inside: on ranks that hold no heads as on others, unsent.

Two heads over four ranks: the last two hold none, and would wait for the others.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.megatron.small_gpt import Setting
from tests.megatron.test_core_attention import B, Case, D, S, build_core
from tests.support.pool import run_ranks
from tests.support.wire import count_wire
from ulysses_mc import ParallelConfigError, megatron_on_cpu

pytestmark = [pytest.mark.megatron, pytest.mark.filterwarnings("ignore:uneven")]
pytest.importorskip("megatron.core")

RANKS = 4


def plain(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool, scale: float
) -> torch.Tensor:
    return value


def wider(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any) -> torch.Tensor:
    return torch.cat([value, value], -1)


def calls_of(core: Any) -> list[tuple[dict[str, Any], str]]:
    """What is given beside query, key and value, and what the error says."""
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds = torch.tensor([0, 8, 16], dtype=torch.int32)
    documents = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    mask, bias = torch.zeros(1, 1, S, S, dtype=torch.bool), torch.zeros(1, 2, S, S).double()
    calls: list[tuple[dict[str, Any], str]] = [
        ({"attention_mask": mask.float()}, "attention_mask of dtype"),
        ({"attention_mask": mask[:, :, :8].double()}, "attention_mask of dtype|a row for each"),
        ({"attention_mask": mask[..., :5]}, "attention_mask of shape"),
        ({"attention_mask": mask.expand(3, 1, S, S)}, "attention_mask of shape"),
        ({"attention_mask": [True]}, "attention_mask is a list"),
        ({"attention_bias": bias.bool()}, "attention_bias of dtype"),
        ({"attention_bias": bias[..., :5]}, "attention_bias of shape"),
        ({"attention_bias": bias.expand(3, 2, S, S)}, "attention_bias of shape"),
    ]
    if core == "DotProductAttention":
        calls += [
            ({"attention_bias": bias}, "An attention_bias with Megatron's Dot"),
            ({"packed_seq_params": documents}, "Packed documents with Megatron's Dot"),
        ]
    if core is plain:
        calls += [
            ({"attention_bias": bias}, "attention plain with attention_bias"),
            ({"attention_mask": mask}, "attention plain with attention_mask"),
            ({"packed_seq_params": documents}, "attention plain with cu_seqlens"),
            ({"num_splits": 2}, "called with num_splits"),
        ]
    return calls


def refuse_all(core: Any) -> list[str]:
    said = []
    with megatron_on_cpu():
        Setting(cp=RANKS).initialize()
        attention = build_core(Case(1, RANKS, 2, 2, core))
        for options, says in calls_of(core):
            tensors = [torch.zeros(S // RANKS, B, 2, D).double() for _ in range(3)]
            with count_wire() as wire, pytest.raises(ParallelConfigError, match=says) as error:
                attention(*tensors, **({"attention_mask": None} | options))
            assert wire.exchanges == 0, says
            said.append(str(error.value).split(" on rank ")[0])
    return said


@pytest.mark.parametrize("core", ["DotProductAttention", "sdpa", plain], ids=str)
def test_before_anything_is_sent(core: Any) -> None:
    first, *others = run_ranks(RANKS, refuse_all, core)
    assert len(first) >= 8 and all(other == first for other in others)


def other_shape() -> str:
    with megatron_on_cpu():
        Setting(cp=RANKS).initialize()
        attention = build_core(Case(1, RANKS, 2, 2, wider))
        tensors = [torch.zeros(S // RANKS, B, 2, D).double() for _ in range(3)]
        with pytest.raises(ParallelConfigError) as error:
            attention(*tensors, None)
        return str(error.value)


def test_an_output_of_another_shape() -> None:
    for message in run_ranks(RANKS, other_shape):
        assert f"returned [{B}, {S}, 1, {2 * D}]" in message


def wrong_core() -> str:
    from megatron.core.transformer.module import MegatronModule

    class Core(MegatronModule):
        def __init__(self, config: Any, **_: Any) -> None:
            raise ParallelConfigError(f"Not with {config.num_attention_heads} heads.")

    with megatron_on_cpu():
        Setting(cp=RANKS).initialize()
        with pytest.raises(ParallelConfigError) as error:
            build_core(Case(1, RANKS, 2, 2, Core))  # type: ignore[arg-type]
        return str(error.value)


def test_a_core_that_cannot_be_built() -> None:
    for message in run_ranks(RANKS, wrong_core):
        assert message.startswith("Not with 1 heads.")
