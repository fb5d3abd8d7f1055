"""Norms for Megatron layers that know of its sequence_parallel, without TransformerEngine."""

from __future__ import annotations

from typing import Any

import torch

from ..parallel_state.errors import ParallelConfigError
from .fused import build_norm, norm_in_use


class Norm:
    """Builds the norm that `config.normalization` names: a LayerNorm or an RMSNorm.

    On GPUs TransformerEngine's or apex's where one is installed, else PyTorch's
    (`norms_in_use(model)` says which and why).

    With `config.sequence_parallel` (activations cut along the sequence over tensor-parallel
    ranks) each rank's gradient of the norm's parameters covers its own tokens only. Marked
    parameters are summed over the tensor-parallel ranks by Megatron's `finalize_model_grads`.

    Args:
        config: TransformerConfig.
        hidden_size: the last dim of what is normalised.
        eps: added to the variance.

    Raises:
        ParallelConfigError: another normalisation than LayerNorm and RMSNorm.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        kinds = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
        if config.normalization not in kinds:
            raise ParallelConfigError(
                f"normalization={config.normalization!r}.",
                rule=f"one of {', '.join(kinds)}",
            )
        centered = config.layernorm_zero_centered_gamma
        cuda = torch.cuda.is_available() and not config.use_cpu_initialization
        choice = norm_in_use(config.normalization, centered, cuda)
        norm: torch.nn.Module
        if choice.kind is None:
            norm = kinds[config.normalization](hidden_size, eps, zero_centered=centered)
        else:
            dtype = config.params_dtype
            norm = build_norm(choice, hidden_size, eps, zero_centered=centered, dtype=dtype)
        vars(norm)["choice"] = choice  # for `norms_in_use`
        for parameter in norm.parameters():
            parameter.data = parameter.data.to(config.params_dtype)
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


class LayerNorm(torch.nn.LayerNorm):
    """LayerNorm; `zero_centered` keeps weight - 1 as the parameter."""

    def __init__(self, hidden_size: int, eps: float, *, zero_centered: bool = False) -> None:
        super().__init__(hidden_size, eps)
        self.zero_centered = zero_centered
        if zero_centered:
            torch.nn.init.zeros_(self.weight)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight + 1 if self.zero_centered else self.weight
        return torch.nn.functional.layer_norm(
            input, self.normalized_shape, weight, self.bias, self.eps
        )


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm; `zero_centered` keeps weight - 1 as the parameter."""

    def __init__(self, hidden_size: int, eps: float, *, zero_centered: bool = False) -> None:
        super().__init__(hidden_size, eps)
        self.zero_centered = zero_centered
        if zero_centered:
            torch.nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight + 1 if self.zero_centered else self.weight
        return torch.nn.functional.rms_norm(x, self.normalized_shape, weight, self.eps)
