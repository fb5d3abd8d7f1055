"""Fused norms and optimizers of TransformerEngine and NVIDIA's apex: which are used, and why.

Found by the kernels behind a class, not by a package's name: other packages are called apex, too.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch

from ..apex import nvidia_apex


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
    """TransformerEngine's norm, apex's or PyTorch's, for 'LayerNorm' or 'RMSNorm'."""
    passed_over: dict[str, str] = {}
    for name, module, attribute in (
        ("TransformerEngine", "transformer_engine.pytorch", normalization),
        ("apex", "apex.normalization", f"Fused{normalization}"),
    ):
        reason = "no GPU" if not cuda else ""
        if name == "apex" and not reason:
            reason = "" if nvidia_apex() else "NVIDIA's apex is not installed"
            reason = reason or ("it has no zero-centered weight" if zero_centered else "")
        found = reason or _attribute(module, attribute)
        if (
            name == "TransformerEngine"
            and not isinstance(found, str)
            and not _has_te_kernels(found)
        ):
            found = f"{module}.{attribute} is something else"
        if not isinstance(found, str):
            return Choice(f"{name}'s {attribute}", found, passed_over)
        passed_over[name] = found
    return Choice(f"PyTorch's {normalization}", None, passed_over)


def norms_in_use(model: torch.nn.Module | Iterable[torch.nn.Module]) -> list[str]:
    """What `Norm` chose in a model, or in its pipeline chunks, with the reasons; [] without one."""
    chunks = [model] if isinstance(model, torch.nn.Module) else model
    choices = (getattr(m, "choice", None) for chunk in chunks for m in chunk.modules())
    return sorted({str(choice) for choice in choices if isinstance(choice, Choice)})


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
    """The class that Megatron's optimizer is made of."""
    from megatron.core import optimizer

    return adam_choice(optimizer.Adam)


def adam_choice(adam: Any) -> Choice:
    """Whose Adam a class is, by its kernels."""
    if _has_te_kernels(adam):
        return Choice(f"TransformerEngine's {adam.__name__}", adam)
    if adam in (torch.optim.Adam, torch.optim.AdamW):
        no_gpu = not torch.cuda.is_available()
        reason = "no GPU" if no_gpu else "Megatron found neither's FusedAdam"
        return Choice(f"PyTorch's {adam.__name__}", adam, {"TransformerEngine, apex": reason})
    if nvidia_apex() and adam is _attribute("apex.optimizers", "FusedAdam"):
        return Choice("apex's FusedAdam", adam)
    return Choice(f"{adam.__module__}.{adam.__qualname__}, which is none of those known", adam)


def _has_te_kernels(kind: Any) -> bool:
    """Whether a class comes with TransformerEngine's compiled extension beside it."""
    modules = [sys.modules.get(base.__module__) for base in getattr(kind, "__mro__", ())]
    things = (thing for module in modules for thing in (vars(module).values() if module else ()))
    owners = (t.__name__ if inspect.ismodule(t) else getattr(t, "__module__", "") for t in things)
    return "transformer_engine_torch" in owners


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
