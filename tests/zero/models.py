"""A small Llama and a batch, equal on every rank and in every layout."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY = 96


def llama(dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """Four query heads over two key/value heads; attention sharpened, so that a wrong one shows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return seeded(LlamaForCausalLM, LlamaConfig, dtype, **changes)


def seeded(model_class: Any, config_class: Any, dtype: torch.dtype, **changes: Any) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(1)
    model = model_class(config_class(**{**sizes, **changes})).to(dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.mul_(5)
            elif weight.dim() == 1:  # norms away from 1, so that their gradients are told apart
                weight.add_(torch.linspace(-0.3, 0.3, weight.numel(), dtype=dtype))
    return model


def tokens(batch: int, length: int, seed: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (batch, length), generator=generator)
