"""Two seconds at the start that find what would otherwise be a wrong loss after days."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import ulysses_mc
from ulysses_mc import __version__, layers, parallel_state
from ulysses_mc.parallel_state.agreement import check_agreement

from .config import Config, known_keys
from .data import digest_of_samples

if TYPE_CHECKING:
    from .trainer import Trainer

MIN_PROBE_LENGTH = 64


def ranks_agree(config: Config, train_data: Any, first_sample: int) -> None:
    """Every rank was given the same config, runs the same versions, and has the same data order.

    Raises:
        ParallelConfigError: on every rank, naming the fields and the ranks that differ.
    """
    values = {key: _value(config, key) for key in known_keys()}
    settings = {key: v for key, v in values.items() if not dataclasses.is_dataclass(v)}
    packages = ("torch", "megatron-core", "numpy")
    versions = {f"version of {name}": version(name) for name in packages}
    data = {"training samples": len(train_data), "data order": data_order(train_data, first_sample)}
    code = {"version of ulysses_mc": __version__, "code": code_digest()}
    check_agreement(
        {**settings, **versions, **code, **data},
        timedelta(minutes=config.parallel.distributed_timeout_minutes),
    )


def code_digest() -> str:
    """Of the source files of this example and of the library: a node with another checkout."""
    digest = hashlib.sha256()
    for module in (ulysses_mc, parallel_state, layers, sys.modules[__name__]):
        folder = Path(module.__file__ or "").parent
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def data_order(dataset: Any, first_sample: int, samples: int = 4) -> str:
    """A digest of the next few samples."""
    return digest_of_samples(dataset, range(first_sample, first_sample + samples))


def _value(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def attention_reaches_all_ranks(trainer: Trainer) -> None:
    """Another rank's tokens change the last rank's loss, by a run of the real pipeline: the first
    token of all, or where attention has a window the one before the last rank's own.

    Raises:
        RuntimeError: they do not: attention is confined to each rank's own tokens.
    """
    shape = trainer.shape
    ranks = shape.grid.size("cp")
    if ranks == 1:
        return
    length = -(-MIN_PROBE_LENGTH // shape.token_multiple) * shape.token_multiple
    chunk = length // (2 * ranks)
    tokens = torch.arange(length) % shape.vocab_size
    mask = torch.zeros(length)
    changed = tokens.clone()
    # The last rank has the two chunks in the middle, in Megatron's order.
    if getattr(trainer.model_config, "window_size", None) is None:
        seen = slice(0, chunk)
        mask[ranks * chunk : (ranks + 1) * chunk] = 1
    else:  # which may not reach far: the last token of another rank, by the next one
        seen = slice((ranks - 1) * chunk - 1, (ranks - 1) * chunk)
        mask[(ranks - 1) * chunk] = 1
    changed[seen] = (changed[seen] + shape.vocab_size // 2) % shape.vocab_size
    before, after = (_loss(trainer, variant, mask) for variant in (tokens, changed))
    if before == after:
        raise RuntimeError(
            f"self-check: other tokens on another of {ranks} ranks leave the loss on the last "
            f"one at {before}: its attention does not see them. (training.self_check false turns "
            "this check off; the training would go wrong all the same.)"
        )


def _loss(trainer: Trainer, tokens: torch.Tensor, mask: torch.Tensor) -> float:
    length = len(tokens)
    batch = {
        "tokens": tokens[None],
        "labels": tokens[None],
        "loss_mask": mask[None],
        "position_ids": torch.arange(length).clamp(max=trainer.config.model.seq_length - 1)[None],
    }
    # An interleaved pipeline takes a multiple of its stages.
    steps = trainer.shape.grid.size("pp") if len(trainer.model) > 1 else 1
    with trainer.evaluating():
        batches = [iter([batch] * steps) for _ in trainer.model]
        return trainer.run_batches(batches, steps, 1, length, train=False).loss
