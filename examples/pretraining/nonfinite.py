"""Where a NaN or an infinity came from: the rank and the tensor."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from .trainer import Trainer


@dataclass(frozen=True, order=True)
class Finding:
    """The first tensor of a rank that is not finite. Earlier in the forward pass is smaller."""

    micro_batch: int
    stage: int
    place: int
    rank: int
    tensor: str


def stop(trainer: Trainer, what: str, *, gradients: bool) -> NoReturn:
    """Raises FloatingPointError with the step, the rank and the tensor. Collective: every rank
    knows the loss and the gradient norm.

    Looked for in the gradients (`gradients`), or in the parameters and then in the outputs of
    modules in another forward pass.
    """
    if gradients:
        named = ((name, p.main_grad) for name, p in _named_parameters(trainer.model))
        where = _first(_first_of(named, "gradient of"))
    else:
        where = _in_parameters(trainer) or _first(_in_forward_pass(trainer))
    first, shape = trainer.progress.consumed_samples, trainer.shape
    raise FloatingPointError(
        f"{what} at iteration {trainer.progress.iteration + 1} (samples {first} to "
        f"{first + shape.global_batch_size - 1}); first in {where or 'nothing when repeated'}"
    )


def check_parameters(trainer: Trainer) -> None:
    """Before a checkpoint is written: the last step's update is in no loss yet. Collective.

    Raises:
        FloatingPointError: on every rank, with the rank and the parameter.
    """
    if where := _in_parameters(trainer):
        raise FloatingPointError(
            f"not finite after the update of iteration {trainer.progress.iteration}: {where}; "
            "not saved, the checkpoints before it are untouched"
        )


def _in_parameters(trainer: Trainer) -> str:
    named = ((name, p.data) for name, p in _named_parameters(trainer.model))
    return _first(_first_of(named, "parameter"))


def _in_forward_pass(trainer: Trainer) -> list[Finding]:
    """The first output of a module of this rank, in the step's forward pass done again."""
    found: list[Finding] = []
    calls: Counter[str] = Counter()
    shape = trainer.shape
    with contextlib.ExitStack() as hooks:
        for name, module in _named_modules(trainer.model):
            handle = module.register_forward_hook(_look(name, calls, found, trainer))
            hooks.callback(handle.remove)
        with trainer.evaluating():
            trainer.run_batches(
                trainer.next_batches(),
                shape.accumulation_steps,
                shape.micro_batch_size,
                shape.padded_seq_length,
                train=False,
            )
    return found


def _look(name: str, calls: Counter[str], found: list[Finding], trainer: Trainer) -> Any:
    def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        calls[name] += 1
        if found or _finite(output):
            return
        # Inner modules return before outer ones: the first to report is the innermost.
        tensor = f"the output of {name}" + ("" if _finite(inputs) else " (already in its input)")
        place = trainer.state.rank("pp"), calls.total()
        found.append(Finding(calls[name], *place, dist.get_rank(), tensor))

    return hook


def _first(mine: list[Finding]) -> str:
    """The earliest of all ranks' findings, in words."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    found = sorted(finding for findings in gathered for finding in findings)
    if not found:
        return ""
    key = found[0].micro_batch, found[0].stage, found[0].place
    first = [f for f in found if (f.micro_batch, f.stage, f.place) == key]
    text = "; ".join(f"rank {f.rank}: {f.tensor}" for f in first)
    rest = len({f.rank for f in found} - {f.rank for f in first})
    return text + (f"; later also on {rest} other ranks" if rest else "")


def _first_of(named: Iterator[tuple[str, torch.Tensor]], what: str) -> list[Finding]:
    for place, (name, tensor) in enumerate(named):
        bad = tensor.numel() - int(torch.isfinite(tensor).sum())
        if bad:
            text = f"{what} {name} ({bad} of {tensor.numel()} elements)"
            return [Finding(0, 0, place, dist.get_rank(), text)]
    return []


def _finite(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.is_floating_point() or bool(torch.isfinite(value).all())
    if isinstance(value, tuple | list):
        return all(_finite(part) for part in value)
    return True


def _named_modules(model: list[Any]) -> Iterator[tuple[str, torch.nn.Module]]:
    for chunk in model:
        for name, module in chunk.named_modules():
            if name:
                yield _global_name(chunk, name), module


def _named_parameters(model: list[Any]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            yield _global_name(chunk, name), parameter


def _global_name(chunk: Any, name: str) -> str:
    """Without the wrappers, and with the layer's number in the whole model."""
    while name.startswith("module."):
        name, chunk = name.removeprefix("module."), chunk.module
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"] and len(parts) > 2:
        layer = chunk.get_submodule(".".join(parts[:3]))
        parts[2] = str(getattr(layer, "layer_number", int(parts[2]) + 1) - 1)
    return ".".join(parts)
