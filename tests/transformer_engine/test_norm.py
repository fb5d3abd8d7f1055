"""TransformerEngine's norms take what ours hand them (their kernels need a GPU)."""

from __future__ import annotations

import pytest
import torch

from ulysses_mc import megatron_on_cpu

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(torch.cuda.is_available(), reason="builds on a CPU"),
]


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_built_with_our_arguments(kind: str, zero_centered: bool) -> None:
    from ulysses_mc.layers import fused

    choice = fused.norm_in_use.__wrapped__(kind, zero_centered, True)
    assert choice.name == f"TransformerEngine's {kind}"
    with megatron_on_cpu():
        norm = fused.build_norm(choice, 8, 1e-6, zero_centered=zero_centered, dtype=torch.bfloat16)
    names = ["weight", "bias"] if kind == "LayerNorm" else ["weight"]
    assert [name for name, _ in norm.named_parameters()] == names
    expected = 0.0 if zero_centered else 1.0
    assert norm.weight.dtype == torch.bfloat16 and (norm.weight == expected).all()


def test_its_adam_is_known_by_its_kernels() -> None:
    from transformer_engine.pytorch.optimizers import FusedAdam

    from ulysses_mc.layers import fused

    assert str(fused.adam_choice(FusedAdam)) == "TransformerEngine's FusedAdam"
    decoy = type("FusedAdam", (), {"__module__": "transformer_engine"})
    assert str(fused.adam_choice(decoy)).startswith("transformer_engine.FusedAdam, which is none")
    assert str(fused.adam_in_use()) == "TransformerEngine's FusedAdam"  # what Megatron found
