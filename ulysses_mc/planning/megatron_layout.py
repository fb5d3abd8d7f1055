"""How Megatron's flags divide the sequence and the layers, and whose layers they build."""

from __future__ import annotations

import re
from difflib import get_close_matches

from .fields import Fields
from .problems import Problem
from .who_runs import OURS, STOCK

_SPLIT = ("num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank")
BY_HAND = ("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers",
           "pipeline-model-parallel-layout")  # fmt: skip


def runs_on(fields: Fields) -> str:
    """This package's layers where `--spec` names them, else Megatron's own."""
    named = any("ulysses_mc" in word for word in fields.values.get("spec") or [])
    return OURS if named else STOCK


def hand_made(fields: Fields) -> list[Problem]:
    """Stages that somebody filled by hand, which nothing here models."""
    return [
        Problem(f"{fields.source}: --{name}", "pipeline stages filled by hand are not modelled",
                "stages of equal size, or --account-for-embedding-in-pipeline-split with "
                "--account-for-loss-in-pipeline-split")
        for name in BY_HAND
        if fields.values.get(name) is not None
    ]  # fmt: skip


def context_sizes(fields: Fields) -> tuple[int, int]:
    """(Ulysses, ring) sizes of Megatron's context-parallel group."""
    size = fields.whole("context-parallel-size", default=1)
    kinds = fields.values.get("cp-comm-type") or ["p2p"]
    ours = runs_on(fields) == OURS
    known = ("p2p", "a2a", "allgather", "all_gather", "a2a+p2p")
    for kind in kinds:
        if kind not in known:
            near = get_close_matches(str(kind), known, n=1, cutoff=0.4)
            text = f"{fields.source}: --cp-comm-type {kind}"
            fields.problems.append(Problem(text, f"one of {', '.join(known)}", near[0]
                                           if near else ""))  # fmt: skip
    if kinds[0] != "a2a+p2p":
        return (size, 1) if kinds[0] == "a2a" or ours else (1, size)
    sizes = fields.values.get("hierarchical-context-parallel-sizes") or []
    if len(sizes) != 2 or not all(re.fullmatch("[1-9][0-9]{0,8}", s) for s in sizes):
        fields.problems.append(
            Problem(
                f"{fields.source}: --cp-comm-type a2a+p2p with "
                f"--hierarchical-context-parallel-sizes {' '.join(sizes) or '(none)'}",
                "two sizes, Ulysses and ring",
                f"--hierarchical-context-parallel-sizes {size} 1",
            )
        )
        return size, 1
    ulysses, ring = int(sizes[0]), int(sizes[1])
    if ulysses * ring != size:
        fields.problems.append(
            Problem(
                f"{fields.source}: --hierarchical-context-parallel-sizes {ulysses} {ring}",
                f"they multiply to --context-parallel-size {size}",
                f"--context-parallel-size {ulysses * ring}",
            )
        )
    return ulysses, ring


def chunks(fields: Fields, layers: int, pp: int) -> int:
    """Model chunks of a stage, from either of Megatron's two flags."""
    if fields.values.get(_SPLIT[1]):
        return fields.whole(_SPLIT[1])
    if not fields.values.get(_SPLIT[0]):
        return 1
    each, stage = fields.whole(_SPLIT[0]), layers // pp
    if not stage or stage % each:
        fields.problems.append(
            Problem(
                f"{fields.source}: --{_SPLIT[0]} {each} with {stage} layers on a stage",
                "the chunks of a stage are of equal size",
                " or ".join(str(n) for n in range(1, stage + 1) if stage % n == 0),
            )
        )
        return 1
    return stage // each
