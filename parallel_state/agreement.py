"""All ranks compare their settings before the first group is made, instead of hanging in it, and
meet again when all are made."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING

import torch.distributed as dist

from .errors import ParallelConfigError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_RULE = "every rank starts with the same settings, world size and library versions."
_VERDICT_MARGIN = timedelta(seconds=5)  # the other ranks wait longer for rank 0 than it for them


def check_agreement(settings: Mapping[str, object], timeout: timedelta) -> None:
    """Compare `settings` over the default group's store; rank 0 compares and tells the others.

    Two messages for each rank, so that thousands of ranks take a second. A collective of the
    default group would do too, but needs a device under NCCL and hangs when a rank is missing.

    Args:
        settings: name -> value; compared by `repr`, functions by their names.
        timeout: how long rank 0 waits for all ranks.

    Raises:
        ParallelConfigError: on every rank alike; names the fields and ranks that differ, or the
            ranks that never came.
    """
    if dist.get_backend() == "fake":  # one process plays all ranks: nobody answers
        return
    store = dist.distributed_c10d._get_default_store()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # Counted in the store rather than here: a new store starts anew, and so does the count.
    attempt = store.add(f"ulysses_mc/agreement/attempts/{rank}", 1)
    prefix = f"ulysses_mc/agreement/{attempt}"
    store.set(f"{prefix}/{rank}", json.dumps({name: _text(v) for name, v in settings.items()}))
    if rank == 0:
        store.set(f"{prefix}/verdict", _verdict(store, prefix, world_size, timeout))
    try:
        store.wait([f"{prefix}/verdict"], timeout + _VERDICT_MARGIN)
    except RuntimeError as error:
        raise ParallelConfigError(
            f"Rank {rank} waited {timeout.total_seconds():g} s for rank 0 to compare settings.",
            f"Ranks that have not come: {_missing(store, prefix, world_size)}.",
            _RULE,
        ) from error
    verdict = store.get(f"{prefix}/verdict").decode()
    if verdict != "agreed":
        raise ParallelConfigError(*verdict.split("\t"))


def _text(value: object) -> str:
    """`repr`, without the addresses that differ between processes."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_text(item)}" for key, item in sorted(value.items())) or "none"
    if callable(value):
        return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__name__)}"
    return repr(value)


def _verdict(store: Store, prefix: str, world_size: int, timeout: timedelta) -> str:
    """ "agreed", or the parts of the error separated by tabs."""
    deadline = monotonic() + timeout.total_seconds()
    answers = []
    for rank in range(world_size):
        try:
            left = timedelta(seconds=max(deadline - monotonic(), 0.001))
            store.wait([f"{prefix}/{rank}"], left)
        except RuntimeError:
            missing = _missing(store, prefix, world_size)
            request = f"{world_size} ranks were to compare settings."
            seconds = f"{timeout.total_seconds():g} s"
            return f"{request}\tAfter {seconds} these have not come: {missing}.\t{_RULE}"
        answers.append(json.loads(store.get(f"{prefix}/{rank}")))
    differences = find_differences(answers)
    if not differences:
        return "agreed"
    return "\t".join(["The ranks were given different settings.", differences, _RULE])


def find_differences(answers: list[dict[str, str]]) -> str:
    """One line for each field that differs: its values, the commonest first, and their ranks."""
    lines = []
    for name in dict.fromkeys(name for answer in answers for name in answer):
        ranks_of: dict[str, list[int]] = {}
        for rank, answer in enumerate(answers):
            ranks_of.setdefault(answer.get(name, "not given"), []).append(rank)
        if len(ranks_of) > 1:
            common_first = sorted(ranks_of.items(), key=lambda item: -len(item[1]))
            values = (f"{value} on {_name_ranks(ranks)}" for value, ranks in common_first)
            lines.append(f"{name}: {', '.join(values)}")
    return "\n  ".join(lines)


def _missing(store: Store, prefix: str, world_size: int) -> str:
    absent = [rank for rank in range(world_size) if not store.check([f"{prefix}/{rank}"])]
    return _name_ranks(absent) if absent else "none"


def _name_ranks(ranks: Iterable[int]) -> str:
    """
    >>> _name_ranks([0, 1, 2, 5]), _name_ranks([3])
    ('ranks 0-2, 5', 'rank 3')
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank {text}" if text.isdigit() else f"ranks {text}"
