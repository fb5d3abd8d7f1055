"""Fused norms and optimizers of TransformerEngine and NVIDIA's apex: which are used, and why.

Found by the class itself, not by a package's name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch

from ..apex import nvidia_apex

logger = logging.getLogger("ulysses_mc")


@dataclass(frozen=True)
class Choice:
    """What is used for a piece of the model, and why not the others.

    Args:
        name: for people.
        kind: the class; None for the one of `layers/norm.py`, or an optimizer's.
    """

    name: str
    kind: Any = None
    passed_over: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        others = "; ".join(f"not {name}: {reason}" for name, reason in self.passed_over.items())
        return f"{self.name} ({others})" if others else self.name


@lru_cache(maxsize=8)
def norm_in_use(normalization: str, zero_centered: bool, cuda: bool) -> Choice:
    """TransformerEngine's norm, apex's or PyTorch's, for 'LayerNorm' or 'RMSNorm'; logged once."""
    passed_over: dict[str, str] = {}
    for name, module, attribute in (
        ("TransformerEngine", "transformer_engine.pytorch", normalization),
        ("apex", "apex.normalization", f"Fused{normalization}"),
    ):
        reason = "no GPU" if not cuda else ""
        if name == "apex" and not reason:
            reason = "" if nvidia_apex() else "NVIDIA's apex is not installed"
            reason = reason or ("it has no zero-centered weight" if zero_centered else "")
        found = None if reason else _attribute(module, attribute)
        if found is not None and not isinstance(found, str):
            choice = Choice(f"{name}'s {attribute}", found, passed_over)
            break
        passed_over[name] = reason or str(found)
    else:
        choice = Choice(f"PyTorch's {normalization}", None, passed_over)
    logger.info("norm: %s", choice)
    return choice


def build_norm(
    choice: Choice, size: int, eps: float, *, zero_centered: bool, dtype: torch.dtype
) -> torch.nn.Module:
    """The chosen norm of another package."""
    if choice.name.startswith("apex"):
        module: torch.nn.Module = choice.kind(size, eps=eps)
        return module.to(device="cuda", dtype=dtype)
    device = torch.cuda.current_device()
    module = choice.kind(
        size, eps=eps, zero_centered_gamma=zero_centered, dtype=dtype, device=device
    )
    return module


def adam_in_use() -> Choice:
    """The class that Megatron's optimizer is made of, by where it was defined."""
    from megatron.core import optimizer

    adam = optimizer.Adam
    owner = adam.__module__.partition(".")[0]
    names = {"transformer_engine": "TransformerEngine", "apex": "apex", "torch": "PyTorch"}
    passed_over = {}
    if owner == "torch":
        passed_over["TransformerEngine, apex"] = (
            "no GPU" if not torch.cuda.is_available() else "Megatron found neither's FusedAdam"
        )
    return Choice(f"{names.get(owner, owner)}'s {adam.__name__}", adam, passed_over)


def _attribute(module: str, name: str) -> Any:
    """The class, or why there is none."""
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError:
        return "not installed"
    except AttributeError:
        return f"it has no {name}"
    except Exception as error:  # built for another torch or CUDA
        return f"does not import: {error!r:.200}"
