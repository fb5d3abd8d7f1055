"""Checkpoints that are whole or not there.

    OUTPUT/checkpoints/latest_checkpointed_iteration.txt     the newest iteration, moved last
    OUTPUT/checkpoints/iter_0000100/                         Megatron's torch_dist format, and
        run.json        iteration, consumed samples, the model and the layout it was saved under
        manifest.json   size and SHA-256 of every file

A checkpoint is written to a hidden folder beside the others, renamed when every rank has written
its part, and named in `latest_checkpointed_iteration.txt` after that. All ranks see one file
system.
"""

from __future__ import annotations

import dataclasses
import pickle
import shutil
import uuid
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from . import adam_state, manifest, random_state
from .config import Config
from .errors import UserError
from .manifest import LATEST, newest, unnamed
from .preflight import RunShape
from .safe_load import check_metadata, only_tensors
from .writing import in_this_process

# What may differ between the run that saved and the run that loads.
_FREE = {"seq_length", "recompute", "transformer_impl", "local_attention", "attention_dropout",
         "hidden_dropout", "make_vocab_size_divisible_by", "vocab_size"}  # fmt: skip
_HOW = {"sequence_parallel", "recompute_granularity", "recompute_method", "recompute_num_layers",
        "recompute_modules", "deterministic_mode", "tp_comm_overlap", "calculate_per_token_loss",
        "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
        "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
        "pipeline_model_parallel_layout"}  # fmt: skip
_NOT_LAYOUT = {"distributed_timeout_minutes", "data_parallel_size"}  # data parallel: as given


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    iteration: int = 0
    consumed_samples: int = 0


def find(config: Config) -> Path | None:
    """The checkpoint to start from: the run's own newest one, else checkpoint.load, else None.

    Raises:
        UserError: a checkpoint that should be there is not, or is of another model.
    """
    own = Path(config.output) / "checkpoints"
    if config.checkpoint.resume and (own / LATEST).exists():
        return newest(own)
    if config.checkpoint.resume and (path := unnamed(own)) is not None:
        return path
    if config.checkpoint.load is None:
        return None
    given = Path(config.checkpoint.load)
    if (given / LATEST).is_file():
        return newest(given)
    if not (given / "run.json").is_file():
        raise UserError(f"checkpoint.load {given} has neither {LATEST} nor run.json in it")
    return given


def progress_of(run: dict[str, Any]) -> Progress:
    return Progress(run["iteration"], run["consumed_samples"])


def model_facts(config: Config, shape: RunShape) -> dict[str, Any]:
    """What makes two checkpoints interchangeable."""
    facts = {k: v for k, v in dataclasses.asdict(config.model).items() if k not in _FREE}
    facts["transformer"] = {k: v for k, v in facts["transformer"].items() if k not in _HOW}
    facts["num_query_groups"] = config.model.num_query_groups or config.model.num_attention_heads
    return {**facts, "vocab_size": shape.vocab_size}


def check_run(path: Path, config: Config, shape: RunShape) -> dict[str, Any]:
    """run.json of `path`, after comparing its model with the config's.

    Raises:
        UserError: naming every field that differs.
    """
    run = manifest.read_run(path)
    saved = run["model"]
    wanted = model_facts(config, shape)
    different = [
        f"{key} is {saved.get(key)!r} there and {wanted.get(key)!r} here"
        for key in sorted(saved.keys() | wanted.keys())
        if saved.get(key) != wanted.get(key)
    ]
    if different:
        raise UserError(f"{path} is a checkpoint of another model: {'; '.join(different)}")
    rows = run.get("padded_vocab_size", shape.padded_vocab_size)
    if rows != shape.padded_vocab_size:
        raise UserError(
            f"{path} has an embedding of {rows} rows, this run one of {shape.padded_vocab_size} (a "
            "multiple of model.make_vocab_size_divisible_by and tensor_model_parallel_size): rows "
            "beyond the vocabulary take part in the softmax, so it would be another model"
        )
    if not run.get("weights_only"):
        _check_optimizer(path, run, config)
    return run


def _check_optimizer(path: Path, run: dict[str, Any], config: Config) -> None:
    """What decides how Megatron lays out the optimizer's state in a checkpoint.

    Raises:
        UserError: it differs from the run that saved.
    """
    distributed = config.optimizer.use_distributed_optimizer
    if run.get("distributed_optimizer", distributed) != distributed:
        raise UserError(
            f"{path} was saved with optimizer.use_distributed_optimizer "
            f"{str(not distributed).lower()}, which is {str(distributed).lower()} here: the two "
            "keep their state in other formats"
        )
    ranks = config.parallel.expert_model_parallel_size
    saved = run["parallel"].get("expert_model_parallel_size", 1)
    if config.model.transformer.get("num_moe_experts") and (saved > 1) != (ranks > 1):
        raise UserError(
            f"{path} was saved with expert_model_parallel_size {saved}, which is {ranks} here: "
            "Megatron keeps the optimizer state of experts apart if expert_model_parallel_size is "
            "above 1, so that a run goes on with 1 if it was 1, and above 1 if it was above"
        )


def save(
    config: Config,
    shape: RunShape,
    progress: Progress,
    model: list[Any],
    optimizer: Any,
    scheduler: Any,
    samples: str,
) -> Path:
    """Writes one checkpoint. Collective; returns its path when it is complete on every rank.

    Args:
        samples: data.samples_read, for `run.json`.
    """
    state = _state(model, optimizer, scheduler, loading=False)
    folder = Path(config.output) / "checkpoints"
    return write(folder, config, shape, progress, state, samples=samples)


def write(
    folder: Path,
    config: Config,
    shape: RunShape,
    progress: Progress,
    state: dict[str, Any],
    *,
    samples: str | None = None,
    weights_only: bool = False,
) -> Path:
    """Writes the sharded `state` as a checkpoint in `folder`. Collective.

    Raises:
        CheckpointNotWritten: a file could not be written. What was there before is untouched.
    """
    from megatron.core import dist_checkpointing

    final = folder / f"iter_{progress.iteration:07d}"
    try:
        partial = _empty_folder(final)
        with in_this_process():
            dist_checkpointing.save(state, str(partial), content_metadata=_format())
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, manifest.hash_own_files(partial))
        if dist.get_rank() == 0:
            run = {
                **dataclasses.asdict(progress),
                "model": model_facts(config, shape),
                "seq_length": config.model.seq_length,
                "precision": config.training.precision,
                "samples_read": samples,
                "weights_only": weights_only,
                "padded_vocab_size": shape.padded_vocab_size,
                "distributed_optimizer": config.optimizer.use_distributed_optimizer,
                "parallel": dataclasses.asdict(config.parallel),
                "world_size": dist.get_world_size(),
                "batch": dataclasses.asdict(config.batch),
                "versions": _versions(),
            }
            manifest.write_json(partial / "run.json", run)
            files = {name: facts for part in parts for name, facts in part.items()}
            files["run.json"] = manifest.facts(partial / "run.json")
            manifest.write_json(partial / manifest.MANIFEST, files)
            manifest.publish(partial, final)
    except (OSError, CheckpointException) as error:  # the latter by all ranks
        reasons = _reasons(error)
        free = shutil.disk_usage(folder).free if folder.is_dir() else 0
        raise CheckpointNotWritten(
            f"checkpoint {final} could not be written: {reasons} ({free >> 10} KiB free); "
            "the checkpoints before it are untouched"
        ) from error
    dist.barrier()
    return final


def _reasons(error: BaseException) -> str:
    """A CheckpointException comes to all ranks; what each has met, to one of them."""
    if isinstance(error, CheckpointException):
        met = [f"rank {r}: {e[0]}" for r, e in sorted(error.failures.items())]
        return "; ".join(met) or "another rank could not write its part, and one says why"
    return str(error)


class CheckpointNotWritten(OSError):
    """A disk is full, or will not be written to."""


def _empty_folder(final: Path) -> Path:
    """A hidden folder of this attempt alone: the writers of a killed one may still be at work."""
    name = [f".{final.name}.partial-{uuid.uuid4().hex[:8]}"]
    if dist.get_rank() == 0:
        for left in final.parent.glob(".iter_*.partial-*"):
            shutil.rmtree(left, ignore_errors=True)
        (final.parent / name[0]).mkdir(parents=True)
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, name)
    return final.parent / names[0][0]


def load(
    path: Path,
    run: dict[str, Any],
    config: Config,
    model: list[Any],
    optimizer: Any,
    scheduler: Any,
) -> Progress:
    """Loads weights, optimizer and schedule saved under any layout. Collective.

    The random state is restored under the same layout, and drawn anew under another one; `run` is
    what check_run returned.
    """
    progress = progress_of(run)
    if config.checkpoint.verify:
        manifest.verify(path)
    if run.get("weights_only"):  # of another program: examples/convert_checkpoint.py
        load_weights(path, model)
        optimizer.reload_model_params()
        return progress
    same_layout = _layout(run["parallel"], run["world_size"]) == _layout(
        dataclasses.asdict(config.parallel), dist.get_world_size()
    )
    adam_state.allocate(optimizer)
    state = _state(model, optimizer, scheduler, loading=True)
    if not same_layout:
        del state["rng"]
    loaded = _read(path, state)
    for name, chunk in _chunks(model):
        chunk.load_state_dict(loaded[name])
    try:
        adam_state.load(optimizer, loaded["optimizer"])
    except (KeyError, ValueError) as error:  # Megatron compares groups of parameters, by all ranks
        raise UserError(
            f"{path} holds an optimizer of other groups of parameters ({error!s:.120}): without "
            "optimizer.use_distributed_optimizer its state fits the layout it was saved under"
        ) from error
    scheduler.load_state_dict(loaded["opt_param_scheduler"])
    if same_layout:
        random_state.restore(loaded["rng"])
    else:
        random_state.seed(config.training.seed, progress.iteration)
    return progress


def load_weights(path: Path, model: list[Any]) -> None:
    """Loads the model's weights alone, saved under any layout. Collective."""
    loaded = _read(path, sharded_weights(model))
    for name, chunk in _chunks(model):
        chunk.load_state_dict(loaded[name])


def sharded_weights(model: list[Any]) -> dict[str, Any]:
    return {name: chunk.sharded_state_dict(metadata=_format()) for name, chunk in _chunks(model)}


def _layout(parallel: dict[str, Any], world_size: int) -> tuple[Any, ...]:
    """What two runs have in common whose ranks hold the same parts."""
    sizes = {k: v for k, v in parallel.items() if k not in _NOT_LAYOUT}
    return sizes, world_size


def _read(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException

    check_metadata(path / ".metadata")
    damaged = pickle.UnpicklingError, EOFError, ValueError, CheckpointException
    try:
        with only_tensors():
            loaded: dict[str, Any] = dist_checkpointing.load(state, path)
    except (*damaged, CheckpointingException) as error:
        # Of files that every rank reads, or told to all ranks.
        raise UserError(f"checkpoint {path} cannot be read: {_reasons(error):.300}") from error
    return loaded


def _format() -> dict[str, Any]:
    """The optimizer's format that any layout can load. New each time: Megatron writes its groups
    into the dict."""
    return {"distrib_optim_sharding_type": "fully_reshardable"}


def _state(model: list[Any], optimizer: Any, scheduler: Any, *, loading: bool) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    state = sharded_weights(model)
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=loading, metadata=_format())
    state["opt_param_scheduler"] = scheduler.state_dict()
    state["rng"] = ShardedObject(
        "rng", random_state.capture(), (dist.get_world_size(),), (dist.get_rank(),), replica_id=0
    )
    return state


def _chunks(model: list[Any]) -> list[tuple[str, Any]]:
    """(name, chunk without its wrappers), so that the keys in the file are the model's own."""
    bare = list(model)
    for i, chunk in enumerate(bare):
        while hasattr(chunk, "module"):  # DistributedDataParallel, Float16Module
            chunk = chunk.module
        bare[i] = chunk
    if len(bare) == 1:
        return [("model", bare[0])]
    return [(f"model{i}", chunk) for i, chunk in enumerate(bare)]


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "megatron-core")}
