"""Checkpoints that are whole or not there.

    OUTPUT/checkpoints/latest_checkpointed_iteration.txt     the newest iteration, moved last
    OUTPUT/checkpoints/iter_0000100/                         Megatron's torch_dist format, and
        run.json        iteration, consumed samples, the model and the layout it was saved under
        manifest.json   size and SHA-256 of every file

A checkpoint is written to `.iter_0000100.partial/`, renamed when every rank has written its part,
and named in `latest_checkpointed_iteration.txt` after that. All ranks see one file system.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import adam_state
from .config import Config
from .errors import UserError
from .preflight import RunShape
from .safe_load import check_metadata

LATEST = "latest_checkpointed_iteration.txt"
# What may differ between the run that saved and the run that loads.
_FREE = {"seq_length", "recompute", "transformer_impl", "local_attention", "attention_dropout",
         "hidden_dropout", "make_vocab_size_divisible_by", "vocab_size"}  # fmt: skip


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
    if config.checkpoint.resume and (own / LATEST).is_file():
        return newest(own)
    if config.checkpoint.load is None:
        return None
    given = Path(config.checkpoint.load)
    if (given / LATEST).is_file():
        return newest(given)
    if not (given / "run.json").is_file():
        raise UserError(f"checkpoint.load {given} has neither {LATEST} nor run.json in it")
    return given


def newest(folder: Path) -> Path:
    text = (folder / LATEST).read_text().strip()
    if not text.isdigit():
        raise UserError(f"{folder / LATEST} says {text!r}, not the number of an iteration")
    path = folder / f"iter_{int(text):07d}"
    if not (path / "run.json").is_file():
        raise UserError(f"{folder / LATEST} names iteration {text}, but {path} is not a checkpoint")
    return path


def model_facts(config: Config, shape: RunShape) -> dict[str, Any]:
    """What makes two checkpoints interchangeable."""
    facts = {k: v for k, v in dataclasses.asdict(config.model).items() if k not in _FREE}
    facts["num_query_groups"] = config.model.num_query_groups or config.model.num_attention_heads
    return {**facts, "vocab_size": shape.vocab_size}


def check_run(path: Path, config: Config, shape: RunShape) -> dict[str, Any]:
    """run.json of `path`, after comparing its model with the config's.

    Raises:
        UserError: naming every field that differs.
    """
    try:
        run: dict[str, Any] = json.loads((path / "run.json").read_text())
        saved: dict[str, Any] = run["model"]
        Progress(int(run["iteration"]), int(run["consumed_samples"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path / 'run.json'} is damaged: {error!r}") from None
    wanted = model_facts(config, shape)
    different = [
        f"{key} is {saved.get(key)!r} there and {wanted.get(key)!r} here"
        for key in sorted(saved.keys() | wanted.keys())
        if saved.get(key) != wanted.get(key)
    ]
    if different:
        raise UserError(f"{path} is a checkpoint of another model: {'; '.join(different)}")
    return run


def save(
    config: Config,
    shape: RunShape,
    progress: Progress,
    model: list[Any],
    optimizer: Any,
    scheduler: Any,
) -> Path:
    """Writes one checkpoint. Collective; returns its path when it is complete on every rank."""
    from megatron.core import dist_checkpointing

    folder = Path(config.output) / "checkpoints"
    final = folder / f"iter_{progress.iteration:07d}"
    partial = folder / f".{final.name}.partial"
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(
        _state(model, optimizer, scheduler, loading=False), str(partial), content_metadata=_format()
    )
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, _hash_own_files(partial))
    if dist.get_rank() == 0:
        run = {
            **dataclasses.asdict(progress),
            "model": model_facts(config, shape),
            "parallel": dataclasses.asdict(config.parallel),
            "world_size": dist.get_world_size(),
            "batch": dataclasses.asdict(config.batch),
            "versions": _versions(),
        }
        _write_json(partial / "run.json", run)
        files = {name: facts for part in parts for name, facts in part.items()}
        files["run.json"] = _facts(partial / "run.json")
        _write_json(partial / "manifest.json", files)
        _publish(partial, final)
    dist.barrier()
    return final


def load(
    path: Path,
    run: dict[str, Any],
    config: Config,
    model: list[Any],
    optimizer: Any,
    scheduler: Any,
) -> Progress:
    """Loads weights, optimizer and schedule saved under any layout. Collective.

    The random state is restored under the same layout only; `run` is what check_run returned.
    """
    from megatron.core import dist_checkpointing

    if config.checkpoint.verify:
        verify(path)
    check_metadata(path / ".metadata")
    same_layout = run["world_size"] == dist.get_world_size() and run[
        "parallel"
    ] == dataclasses.asdict(config.parallel)
    adam_state.allocate(optimizer)
    state = _state(model, optimizer, scheduler, loading=True)
    if not same_layout:
        del state["rng"]
    loaded = dist_checkpointing.load(state, str(path))
    for name, chunk in _chunks(model):
        chunk.load_state_dict(loaded[name])
    adam_state.load(optimizer, loaded["optimizer"])
    scheduler.load_state_dict(loaded["opt_param_scheduler"])
    if same_layout:
        _set_random_state(loaded["rng"])
    return Progress(int(run["iteration"]), int(run["consumed_samples"]))


def verify(path: Path) -> None:
    """Compares each file with manifest.json, the ranks sharing the work. Collective.

    Raises:
        UserError: on every rank, naming each damaged or missing file.
    """
    try:
        files: dict[str, Any] = json.loads((path / "manifest.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path / 'manifest.json'} is damaged: {error!r}") from None
    mine = sorted(files)[dist.get_rank() :: dist.get_world_size()]
    bad = [name for name in mine if not _intact(path / name, files[name])]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, bad)
    damaged = sorted(name for names in found for name in names)
    if damaged:
        raise UserError(f"checkpoint {path} is damaged: {', '.join(damaged)}")


def _format() -> dict[str, Any]:
    """The optimizer's format that any layout can load. New each time: Megatron writes its groups
    into the dict."""
    return {"distrib_optim_sharding_type": "fully_reshardable"}


def _state(model: list[Any], optimizer: Any, scheduler: Any, *, loading: bool) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    state: dict[str, Any] = {
        name: chunk.sharded_state_dict(metadata=_format()) for name, chunk in _chunks(model)
    }
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=loading, metadata=_format())
    state["opt_param_scheduler"] = scheduler.state_dict()
    state["rng"] = ShardedObject(
        "rng", _random_state(), (dist.get_world_size(),), (dist.get_rank(),), replica_id=0
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


def _random_state() -> dict[str, Any]:
    from megatron.core import tensor_parallel

    cuda = torch.cuda.is_available()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if cuda else None,
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def _set_random_state(state: dict[str, Any]) -> None:
    from megatron.core import tensor_parallel

    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])


def _hash_own_files(folder: Path) -> dict[str, Any]:
    """The files this rank wrote: `__RANK_n.distcp`, and on rank 0 what belongs to no rank."""
    rank = dist.get_rank()
    names = [p.name for p in folder.iterdir()]
    own = [n for n in names if n.startswith(f"__{rank}_")]
    if rank == 0:
        own += [n for n in names if not n.startswith("__")]
    return {name: _facts(folder / name) for name in own}


def _facts(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _intact(path: Path, expected: dict[str, Any]) -> bool:
    return path.is_file() and _facts(path) == expected


def _write_json(path: Path, value: Any) -> None:
    with path.open("w") as stream:
        json.dump(value, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())


def _publish(partial: Path, final: Path) -> None:
    """rename is atomic: at no moment does `latest` name something that is not whole."""
    old = final.parent / f".{final.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():  # the same iteration once more
        final.rename(old)
    partial.rename(final)
    shutil.rmtree(old, ignore_errors=True)
    temporary = final.parent / f".{LATEST}.new"
    with temporary.open("w") as stream:
        stream.write(f"{int(final.name.removeprefix('iter_'))}\n")
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(final.parent / LATEST)


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "megatron-core")}
