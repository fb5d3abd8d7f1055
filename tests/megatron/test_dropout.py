"""Row 11: which dropout masks are equal and which differ; recomputation repeats them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.megatron.small_gpt import Setting
from tests.megatron.test_core_attention import Case, build_core
from tests.megatron.test_ulysses_gpt import around_the_specs_core, assert_same, local_block, losses
from tests.support.pool import run_ranks
from ulysses_mc import SequenceLayout, megatron_on_cpu

pytestmark = pytest.mark.megatron
pytest.importorskip("megatron.core")

P = 0.5


def gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    """One tensor per rank, in the order of [cp][tp] at tp 2, cp 2."""
    shards = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, tensor.contiguous())
    return shards


def all_equal(tensors: list[torch.Tensor]) -> bool:
    return all(torch.equal(tensor, tensors[0]) for tensor in tensors)


def assert_kept(masks: torch.Tensor) -> None:
    """The kept fraction is 1 - p within four standard deviations."""
    deviation = (P * (1 - P) / masks.numel()) ** 0.5
    assert abs((masks != 0).double().mean().item() - (1 - P)) < 4 * deviation


def assert_states_equal_over_ulysses() -> None:
    """What Megatron saves and restores, and what draws outside dropout come from."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    a, b, c, d = gathered(torch.get_rng_state())
    assert all_equal([a, b, c, d])
    for state in get_cuda_rng_tracker().get_states().values():
        a, b, c, d = gathered(state)
        assert torch.equal(a, c)
        assert torch.equal(b, d)


def hidden_masks(sequence_parallel: bool) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from ulysses_mc.layers.dropout import ShardDropout, bias_dropout_add

    with megatron_on_cpu():
        Setting(tp=2, cp=2).initialize()
        ones, zeros = torch.ones(8, 2, 64), torch.zeros(8, 2, 64)
        for layer in (
            lambda: bias_dropout_add(True, False)((ones, None), zeros, P),
            lambda: ShardDropout(P)(ones),
        ):
            if sequence_parallel:  # as the transformer block does around all its layers
                with get_cuda_rng_tracker().fork():
                    mask = layer()
            else:
                mask = layer()
            a, b, c, d = gathered(mask)
            assert torch.equal(a, b) == torch.equal(c, d) == (not sequence_parallel)
            assert not torch.equal(a, c)
            assert not torch.equal(b, d)
            assert_kept(torch.stack([a, c]))
            assert not torch.equal(layer(), mask)
        assert_states_equal_over_ulysses()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_row_11_hidden_masks(sequence_parallel: bool) -> None:
    run_ranks(4, hidden_masks, sequence_parallel)


def attention_masks(core: str) -> None:
    from megatron.core import parallel_state

    with megatron_on_cpu():
        Setting(tp=2, cp=2).initialize()
        case = Case(2, 2, 8, 8, core, value_dim=16)
        attention = build_core(case, attention_dropout=P, params_dtype=torch.float32)
        query = torch.zeros(8, 1, 4, 4)  # every weight alike, so that the output shows the mask
        layout = SequenceLayout.zigzag(16, 2)
        own = layout.shard(torch.eye(16), 0, parallel_state.get_context_parallel_rank())
        value = own[:, None, None].expand(8, 1, 4, 16).contiguous()
        first, second = (attention(query, query, value) for _ in range(2))
        assert not torch.equal(first, second)
        a, b, c, d = (shard.view(8, 4, 16).transpose(0, 1) for shard in gathered(first))
        heads = [*torch.cat([a, c], 1), *torch.cat([b, d], 1)]  # 8 heads, the whole sequence
        assert not any(torch.equal(x, y) for i, x in enumerate(heads) for y in heads[:i])
        causal = layout.token_indices(0) + layout.token_indices(1)
        rows = [(head[row], token) for head in heads for row, token in enumerate(causal)]
        assert_kept(torch.cat([weights[: token + 1] for weights, token in rows]))
        assert_states_equal_over_ulysses()
        attention.eval()
        assert torch.equal(attention(query, query, value), attention(query, query, value))


@pytest.mark.parametrize("core", ["DotProductAttention", "sdpa"])
def test_row_11_attention_masks(core: str) -> None:
    run_ranks(4, attention_masks, core)


DROPOUT: dict[str, Any] = dict(attention_dropout=0.1, hidden_dropout=0.1)
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


@pytest.mark.parametrize("spec", [around_the_specs_core, local_block])
@pytest.mark.parametrize("recompute", [FULL, dict(recompute_granularity="selective")], ids=str)
def test_row_11_recomputing_repeats_the_masks(spec: Any, recompute: dict[str, Any]) -> None:
    plain = losses(Setting(cp=2, config=DROPOUT), spec, steps=2)
    assert_same(losses(Setting(cp=2, config=DROPOUT | recompute), spec, steps=2), plain)
    assert not torch.equal(plain, losses(Setting(cp=2), spec, steps=2))
