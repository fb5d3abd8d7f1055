"""Which bytes a checkpoint is made of, and the step that makes it the newest one."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .errors import UserError

LATEST = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"


def newest(folder: Path) -> Path:
    """The checkpoint that `latest_checkpointed_iteration.txt` in `folder` names.

    Raises:
        UserError: it names none.
    """
    path = folder / f"iter_{_latest_iteration(folder / LATEST):07d}"
    if (path / "run.json").is_file():
        return path
    if (_replaced(path) / "run.json").is_file():  # killed between the two renames of publish()
        return _replaced(path)
    raise UserError(f"{folder / LATEST} names {path.name}, but {path} is not a checkpoint")


def _latest_iteration(file: Path) -> int:
    try:
        with file.open("rb") as stream:
            text = stream.read(32).decode("ascii", "backslashreplace").strip()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    if not re.fullmatch("[0-9]{1,12}", text):
        raise UserError(f"{file} says {text!r}, not the number of an iteration")
    return int(text)


def unnamed(folder: Path) -> Path | None:
    """The newest whole checkpoint in `folder`, for where `latest_checkpointed_iteration.txt` is
    missing: a run was killed after its first checkpoint was renamed, or the file was deleted."""
    whole = [
        path
        for path in folder.glob("iter_*")
        if re.fullmatch("iter_[0-9]{7,}", path.name) and (path / MANIFEST).is_file()
    ]
    return max(whole, key=lambda path: int(path.name.removeprefix("iter_")), default=None)


_RUN = {"iteration": int, "consumed_samples": int, "model": dict, "seq_length": int,
        "precision": str, "parallel": dict, "world_size": int}  # fmt: skip


def read_run(path: Path) -> dict[str, Any]:
    """run.json of a checkpoint: what was trained, how, and how far.

    Raises:
        UserError: it cannot be read, or lacks something.
    """
    file = path / "run.json"
    if not file.exists():
        raise UserError(f"{path} is not a checkpoint of this example: it has no run.json")
    run = _read_object(file)
    wrong = [key for key, kind in _RUN.items() if not isinstance(run.get(key), kind)]
    if wrong:
        raise UserError(f"{file} is damaged: {', '.join(wrong)} missing, or of another type")
    return run


def hash_own_files(folder: Path) -> dict[str, Any]:
    """Size and SHA-256 of the files this rank wrote: `__RANK_n.distcp`, and on rank 0 what belongs
    to no rank."""
    rank = dist.get_rank()
    names = [p.name for p in folder.iterdir()]
    own = [n for n in names if n.startswith(f"__{rank}_")]
    if rank == 0:
        own += [n for n in names if not n.startswith("__")]
    return {name: facts(folder / name) for name in own}


def facts(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def verify(path: Path) -> None:
    """Compares each file with manifest.json, the ranks sharing the work. Collective.

    Raises:
        UserError: on every rank, naming each damaged or missing file.
    """
    files = _read_object(path / MANIFEST)
    strange = [name for name in files if Path(name).name != name]
    unknown = {p.name for p in path.iterdir()} | {"run.json"}
    unknown -= files.keys() | {MANIFEST}
    if strange:
        raise UserError(f"{path / MANIFEST} names files outside the checkpoint: {strange}")
    if unknown:
        raise UserError(
            f"{path / MANIFEST} is damaged: it does not name {', '.join(sorted(unknown))}"
        )
    mine = sorted(files)[dist.get_rank() :: dist.get_world_size()]
    bad = [name for name in mine if not _intact(path / name, files[name])]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, bad)
    damaged = sorted(name for names in found for name in names)
    if damaged:
        raise UserError(f"checkpoint {path} is damaged: {', '.join(damaged)}")


def _intact(path: Path, expected: dict[str, Any]) -> bool:
    return path.is_file() and facts(path) == expected


def _read_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is damaged: {error!r}") from None
    if not isinstance(value, dict):
        raise UserError(f"{file} is damaged: it is not an object")
    return value


def write_json(path: Path, value: Any) -> None:
    with path.open("w") as stream:
        json.dump(value, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())


def publish(partial: Path, final: Path) -> None:
    """rename is atomic: at no moment does `latest` name something that is not whole."""
    old = _replaced(final)
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():  # the same iteration once more; newest() knows the moment in between
        final.rename(old)
    partial.rename(final)
    shutil.rmtree(old, ignore_errors=True)
    temporary = final.parent / f".{LATEST}.new"
    with temporary.open("w") as stream:
        stream.write(f"{int(final.name.removeprefix('iter_'))}\n")
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(final.parent / LATEST)


def _replaced(path: Path) -> Path:
    return path.parent / f".{path.name}.old"
