"""On one or more GPUs: the exchange over NCCL, and kernels that cannot run on CPUs.

With fewer GPUs than ranks the ranks share one over gloo. 16 bits against float64 on the CPU.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.support.oracle import attention_gradients
from tests.support.pool import run_ranks
from tests.support.sharded import attend_on_rank, draw, draw_qkv, oracle_options, whole
from ulysses_mc import SequenceLayout
from ulysses_mc.layers.local import (
    flash,
    flash_attention,
    flash_backends,
    flex_attention,
    sdpa_attention,
)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

S, HEADS, KV, D, RANKS = 64, 8, 4, 64, 2
SLOPES = torch.tensor([2.0**-n for n in range(1, HEADS + 1)])
CASES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"causal": True, "window": (9, 0)},
    "documents": {"causal": True, "cu_seqlens": [0, 20, 61, 64]},
    "softcap": {"causal": True, "softcap": 2.0},
    "slopes": {"causal": True, "alibi_slopes": SLOPES},
    "sinks": {"causal": True, "sinks": draw(HEADS, seed=4, dtype=torch.bfloat16)},
}
LOCAL = {"sdpa": sdpa_attention, "flex": flex_attention}


def backend() -> str:
    return "nccl" if torch.cuda.device_count() >= RANKS else "gloo"


def attend(tensors: Any, grad_out: Any, layout: Any, local: str, options: Any) -> Any:
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    on_gpu = [tensor.cuda() for tensor in (*tensors, grad_out)]
    options = {n: o.cuda() if isinstance(o, torch.Tensor) else o for n, o in options.items()}
    function = LOCAL.get(local, flash_attention)
    with only(BY_NAME[local]) if local in BY_NAME else nullcontext():
        found = attend_on_rank(
            tuple(on_gpu[:3]), on_gpu[3], layout, local_attention=function, **options
        )
    return {name: tensor.cpu() for name, tensor in found.items()}


BY_NAME = {b.name: b for b in (flash_backends.FA2, flash_backends.FA3, flash_backends.FA4)}


def only(wanted: flash_backends.FlashBackend) -> AbstractContextManager[Any]:
    """This generation of FlashAttention and no other; the pool's workers run other tests later."""
    return patch.object(flash, "in_order", lambda capability: (wanted,))


def compare(local: str, options: dict[str, Any], layout: SequenceLayout) -> None:
    tensors = tuple(x.bfloat16() for x in draw_qkv(2, S, HEADS, KV, d=D))
    grad_out = draw(2, S, HEADS, D, seed=99, dtype=torch.bfloat16)
    results = run_ranks(
        RANKS, attend, tensors, grad_out, layout, local, options, backend=backend(), timeout=120
    )
    found = whole(results, layout)
    expected = attention_gradients(*tensors, grad_out, **oracle_options(options))
    for name, value in found.items():
        right = getattr(expected, name)
        worst = (value.double() - right).abs().max().item() / right.abs().max().item()
        assert worst < 3e-2, f"{name} is off by {worst:.3g}"


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("local", LOCAL)
def test_kernels_of_pytorch(local: str, case: str) -> None:
    if local == "sdpa" and "softcap" in CASES[case]:
        pytest.skip("sdpa has no softcap")
    compare(local, CASES[case], SequenceLayout.contiguous(S, RANKS))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", BY_NAME)
def test_flash_attention(name: str, case: str) -> None:
    options = {n: o for n, o in CASES[case].items() if n not in ("causal", "cu_seqlens")}
    capability = torch.cuda.get_device_capability()
    reason = flash_backends.why_not(BY_NAME[name], torch.bfloat16, (D, D), capability, options)
    if reason:
        pytest.skip(f"{name}: {reason}")
    if "alibi_slopes" in options:
        pytest.skip(f"{name} has no gradient of slopes, which this test takes")
    compare(name, CASES[case], SequenceLayout.contiguous(S, RANKS))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("lengths", [[40, 24], [33, 31], [64, 0]])
def test_uneven_lengths_and_orders(lengths: list[int]) -> None:
    compare("sdpa", {"causal": True}, SequenceLayout.from_lengths(lengths))
    compare("sdpa", {"causal": True}, SequenceLayout.zigzag(S, RANKS))


@pytest.mark.parametrize("name", BY_NAME)
def test_one_generation_alone_and_only_for_a_while(name: str) -> None:
    before = flash.in_order
    with pytest.raises(ZeroDivisionError), only(BY_NAME[name]):
        assert flash.in_order((9, 0)) == (BY_NAME[name],)
        raise ZeroDivisionError
    assert flash.in_order is before
