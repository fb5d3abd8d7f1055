"""FlexAttention as a local attention: the forward pass here, gradients where there is a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.oracle import attention, attention_gradients
from tests.support.pool import run_ranks
from tests.support.sharded import WHOLE, draw, draw_qkv, oracle_options
from ulysses_mc import SequenceLayout
from ulysses_mc.layers import UlyssesAttention
from ulysses_mc.layers.local import flex, flex_attention

# PyTorch warns that without a compiler, as on the CPU, all logits are in memory.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")

S, HEADS, KV = 9, 4, 2
MASK = draw(1, HEADS, S, S, seed=7) > 0
MASK[..., 3, :] = False  # a query that sees nothing
CASES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "causal window": {"causal": True, "window": (2, 0)},
    "documents": {"cu_seqlens": [0, 3, 8, 9], "causal": True},
    "documents and window": {"cu_seqlens": torch.tensor([0, 6, 9]), "window": (1, 0)},
    "mask": {"attention_mask": MASK},
    "bias": {"attention_bias": draw(1, HEADS, S, S, seed=8), "causal": True},
    "bias of all heads": {"attention_bias": draw(S, S, seed=8)},
    "slopes": {"alibi_slopes": draw(HEADS, seed=9).abs()},
    "sinks": {"sinks": draw(HEADS, seed=10), "causal": True},
    "sinks and mask": {"sinks": draw(HEADS, seed=10), "attention_mask": MASK},
    "softcap": {"softcap": 0.7, "causal": True},
    "softcap and all": {
        "softcap": 0.7,
        "alibi_slopes": draw(HEADS, seed=9).abs(),
        "attention_bias": draw(HEADS, S, S, seed=8),
        "sinks": draw(HEADS, seed=10),
        "cu_seqlens": [0, 4, 9],
        "window": (2, 2),
        "scale": 0.3,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_forward_equals_the_oracle(name) -> None:
    tensors = draw_qkv(2, S, HEADS, KV, d=8, dv=6)
    expected = attention(*tensors, **oracle_options(CASES[name]))
    with torch.no_grad():
        out = flex_attention(*tensors, **CASES[name])
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", [{}, {"cu_seqlens": [0, 2, 4], "cu_seqlens_kv": [0, 4, 9]}])
@pytest.mark.parametrize("causal", [False, True])
def test_other_key_length(options, causal) -> None:
    query, (_, key, value) = draw(1, 4, HEADS, 8), draw_qkv(1, S, HEADS, KV, d=8)
    slopes = draw(HEADS, seed=9).abs()
    options = {**options, "causal": causal, "alibi_slopes": slopes}
    expected = attention(query, key, value, **options)
    with torch.no_grad():
        out = flex_attention(query, key, value, **options)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


def test_padding_after_the_documents_gives_0() -> None:
    with torch.no_grad():
        out = flex_attention(*draw_qkv(1, S, HEADS, KV), cu_seqlens=[0, 3, 6], causal=True)
    assert out[:, :6].abs().min() > 0 and out[:, 6:].abs().max() == 0


def test_block_masks_are_built_once() -> None:
    flex._block_mask.cache_clear()
    with torch.no_grad():
        for seed in range(3):
            for options in ({"causal": True}, {"causal": True, "cu_seqlens": [0, 3, 9]}):
                flex_attention(*draw_qkv(1, S, HEADS, KV, seed=seed), **options)
    assert flex._block_mask.cache_info().misses == 2


def on_rank(name: str, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    layout = SequenceLayout.contiguous(S, dist.get_world_size())
    local = [layout.shard(tensor, 1, dist.get_rank()) for tensor in tensors]
    attend = UlyssesAttention(dist.group.WORLD, layout, local_attention=flex_attention)
    with torch.no_grad():
        return attend(*local, **CASES[name])


@pytest.mark.compiler
@pytest.mark.parametrize("name", ["documents", "bias", "softcap and all"])
def test_inside_ulysses(name) -> None:
    tensors = draw_qkv(2, S, HEADS, KV, d=8)
    out = torch.cat(run_ranks(2, on_rank, name, tensors), 1)
    expected = attention(*tensors, **oracle_options(CASES[name]))
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention's backward needs a GPU")
@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_the_oracle(name) -> None:
    tensors = draw_qkv(2, S, HEADS, KV, d=16)
    grad = draw(2, S, HEADS, 16, seed=11)
    expected = attention_gradients(*tensors, grad, **oracle_options(CASES[name]))
    options = {
        n: o.cuda() if isinstance(o, torch.Tensor) and n != "cu_seqlens" else o
        for n, o in CASES[name].items()
    }
    leaves = {n: t for n, t in zip(("query", "key", "value"), tensors, strict=True)}
    leaves |= {n: o for n, o in options.items() if n in WHOLE}
    leaves = {n: t.float().cuda().requires_grad_() for n, t in leaves.items()}
    out = flex_attention(**(options | leaves))
    grads = torch.autograd.grad(out, list(leaves.values()), grad.float().cuda())
    for leaf, actual in zip(leaves, grads, strict=True):
        right = getattr(expected, WHOLE.get(leaf, leaf))
        limit = 2e-2 * right.abs().max().item()  # tensor cores multiply in TF32
        torch.testing.assert_close(actual.double().cpu(), right, rtol=0, atol=limit)
