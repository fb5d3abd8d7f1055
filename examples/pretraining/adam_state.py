"""What Megatron leaves open in loading the state of PyTorch's own Adam.

Megatron takes Adam from TransformerEngine or apex, and PyTorch's where neither is installed.
Seen in megatron-core 0.16.1 and 0.19.2.
"""

from __future__ import annotations

from typing import Any

import torch


def torch_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """PyTorch's Adams inside Megatron's (chained) optimizer."""
    inner = [getattr(part, "optimizer", None) for part in _parts(optimizer)]
    return [o for o in inner if isinstance(o, torch.optim.Adam | torch.optim.AdamW)]


def allocate(optimizer: Any) -> None:
    """Makes Adam's state before a checkpoint is loaded into it.

    DistributedOptimizer asks the state for its step while preparing to load, and asserts that it
    has one; PyTorch's Adam makes its state in the first step only.
    """
    for inner in torch_optimizers(optimizer):
        for group in inner.param_groups:
            for parameter in group["params"]:
                if not inner.state[parameter]:
                    inner.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }


def load(optimizer: Any, loaded: dict[Any, Any]) -> None:
    """`optimizer.load_state_dict(loaded)`, with the step of each parameter put right.

    DistributedOptimizer copies every tensor of a parameter's state from the checkpoint, but no
    checkpoint holds a step per parameter: KeyError. And it makes one tensor the step of all
    parameters, to which PyTorch adds 1 once per parameter: after a resume the bias correction
    would be wrong from the first step on.
    """
    adams = torch_optimizers(optimizer)
    parts = _parts(optimizer)
    for part, state in zip(parts, _per_part(loaded, parts), strict=True):
        _take_current_settings(part, state)
    if not adams or not any("param_state" in d for d in _per_part(loaded, parts)):
        optimizer.load_state_dict(loaded)
        return
    for part, state in zip(parts, _per_part(loaded, parts), strict=True):
        tensors = state.pop("param_state")
        part.load_state_dict(state)
        steps = {p: s.pop("step") for p, s in part.optimizer.state.items()}
        part.load_parameter_state_from_fully_reshardable(tensors)
        for parameter, step in steps.items():
            part.optimizer.state[parameter]["step"] = step.clone()


def _take_current_settings(part: Any, state: dict[str, Any]) -> None:
    """The config says the rates, betas and epsilon, not the checkpoint; but Megatron (seen in 0.19)
    finds the groups of parameters in a checkpoint by some of them."""
    current = part.optimizer.param_groups
    for group in (state.get("optimizer") or state).get("param_groups", ()):
        for key in ("max_lr", "min_lr", "betas", "eps"):
            values = {own.get(key) for own in current}
            if key in group and len(values) == 1:
                group[key] = values.pop()


def _parts(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _per_part(loaded: dict[Any, Any], parts: list[Any]) -> list[dict[Any, Any]]:
    """Megatron numbers the states of a chain, unless the chain has one member."""
    return [loaded] if len(parts) == 1 else [loaded[i] for i in range(len(parts))]
