"""On GPUs: TransformerEngine's kernels between the exchanges: 16 bits, packed documents, FP8."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.megatron.small_gpt import Setting
from tests.megatron.test_core_attention import Case, build_core
from tests.support.oracle import attention_gradients
from tests.support.pool import run_ranks
from tests.support.sharded import draw, draw_qkv
from ulysses_mc import SequenceLayout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.megatron,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(find_spec("transformer_engine") is None, reason="no TransformerEngine"),
]
pytest.importorskip("megatron.core")

S, HEADS, KV, D, RANKS = 128, 8, 4, 64, 2
BOUNDS = (0, 32, 96, 128)


def run_core(kind: str) -> dict[str, torch.Tensor]:
    """This rank's output and gradients, [1, s_r, h, d]."""
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    Setting(cp=RANKS).initialize()
    config: dict[str, Any] = dict(hidden_size=HEADS * D, kv_channels=D, bf16=True)
    if kind == "fp8":
        config |= dict(fp8="hybrid", fp8_dot_product_attention=True)
    core = build_core(
        Case(1, RANKS, HEADS, KV, "TEDotProductAttention"), params_dtype=torch.bfloat16, **config
    )
    layout = SequenceLayout.zigzag_packed(BOUNDS if kind == "thd" else (0, S), RANKS)
    rank, options = dist.get_rank(), {}
    tensors = [
        layout.shard(tensor, 1, rank).transpose(0, 1).cuda().bfloat16().contiguous()
        for tensor in inputs()
    ]
    if kind == "thd":
        from megatron.core.packed_seq_params import PackedSeqParams

        bounds = torch.tensor(BOUNDS, dtype=torch.int32, device="cuda")
        tensors = [tensor.squeeze(1) for tensor in tensors]
        options["packed_seq_params"] = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=64,
            max_seqlen_kv=64,
        )
    leaves = [tensor.requires_grad_() for tensor in tensors[:3]]
    with fp8_autocast(kind == "fp8"):
        out = core(*leaves, None, **options)
    out.backward(tensors[3].flatten(-2))
    found = dict(zip(("query", "key", "value"), (leaf.grad for leaf in leaves), strict=True))
    found["out"] = out.detach().view_as(tensors[3])
    return {
        name: (x.unsqueeze(1) if kind == "thd" else x).transpose(0, 1).cpu()
        for name, x in found.items()
    }


def fp8_autocast(enabled: bool) -> Any:
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling

    recipe = DelayedScaling(fp8_dpa=True)
    return te.fp8_autocast(enabled=enabled, fp8_recipe=recipe)


def inputs() -> tuple[torch.Tensor, ...]:
    return (*draw_qkv(1, S, HEADS, KV, d=D), draw(1, S, HEADS, D, seed=99))


@pytest.mark.parametrize(("kind", "limit"), [("bf16", 3e-2), ("thd", 3e-2), ("fp8", 2.5e-1)])
def test_against_the_oracle(kind: str, limit: float) -> None:
    if kind == "fp8" and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("FP8 attention needs compute capability 9.0")
    backend = "nccl" if torch.cuda.device_count() >= RANKS else "gloo"
    results = run_ranks(RANKS, run_core, kind, backend=backend, timeout=120)
    documents = BOUNDS if kind == "thd" else None
    layout = SequenceLayout.zigzag_packed(documents or (0, S), RANKS)
    expected = attention_gradients(*inputs(), causal=True, scale=0.3, cu_seqlens=documents)
    for name in ("out", "query", "key", "value"):
        found = layout.unshard([result[name] for result in results], 1).double()
        right = getattr(expected, name)
        worst = (found - right).abs().max().item() / right.abs().max().item()
        assert worst < limit, f"{name} is off by {worst:.3g}"
