"""Measures this machine's links and writes a profile that `ulysses-mc plan --profile` reads.

ulysses-mc bench --output links.json                       starts the ranks itself
torchrun --nproc-per-node 8 -m ulysses_mc bench --output links.json
torchrun --nnodes 2 --nproc-per-node 1 ... -m ulysses_mc bench --output network.json
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..planning.link_fit import OPERATIONS, Fit, fit
from ..planning.problems import Problem, one_of
from .words import whole, writable

if TYPE_CHECKING:
    from .measure import Result

HELP = "measure all-to-all, all-gather, all-reduce and p2p, and fit alpha and beta"
MAX_RANKS = 128  # processes of one machine
SIZES = tuple(2**power for power in range(12, 25, 2))  # 4 KiB to 16 MiB


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--output", metavar="FILE", help="write the profile here")
    add("--ranks", metavar="N", help="ranks to start (default: the GPUs, or 2 without)")
    add("--backend", metavar="NAME", help="gloo or nccl (default: nccl with GPUs, else gloo)")
    add("--largest", metavar="BYTES", default=str(SIZES[-1]), help="largest buffer (16777216)")
    add("--repeats", metavar="N", default="7", help="calls of each size (7)")


def run(options: argparse.Namespace, problems: list[Problem]) -> int:
    problems = list(problems)
    repeats = whole(options.repeats, "--repeats", 1, problems)
    largest = whole(options.largest, "--largest", SIZES[1], problems)
    ranks = 0 if options.ranks is None else whole(options.ranks, "--ranks", 2, problems)
    if ranks > MAX_RANKS:
        text = f"--ranks {ranks} on one machine"
        problems.append(Problem(text, f"at most {MAX_RANKS}", f"--ranks {MAX_RANKS}"))
    if options.backend is not None:
        problems += one_of("--backend", options.backend, ("gloo", "nccl"))
    problems += writable(options.output, "--output")
    from .main import refuse

    gpus = _gpus(problems)
    backend = options.backend or ("nccl" if gpus else "gloo")
    if backend == "nccl" and ranks > gpus:
        text = f"--ranks {ranks} over NCCL with {gpus} GPUs"
        nearest = f"--ranks {gpus}" if gpus > 1 else "--backend gloo"
        problems.append(Problem(text, "a GPU for each rank", nearest))
    refuse(problems)
    from . import measure

    sizes = tuple(size for size in SIZES if size <= largest)
    plan = measure.Plan(backend, sizes, repeats)
    if measure.under_torchrun():
        result = measure.measure_here(plan)
    else:
        # Ranks that are processes of this machine find one another here.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        result = measure.measure_spawned(plan, ranks or (gpus if gpus > 1 else 2))
    if result is not None:
        report(result, options.output)
    return 0


def report(result: Result, output: str | None) -> None:
    """Prints the fits and writes the profile."""
    fits = {name: fit(result.points[name]) for name in OPERATIONS}
    print(f"{result.ranks} ranks on {result.nodes} node(s), {result.backend}, {result.device}")
    print(f"{'operation':12} {'alpha, us':>10} {'beta, GB/s':>11} {'worst error':>12}")
    for name, found in fits.items():
        alpha, beta = 1e6 * found.alpha, found.beta / 1e9
        print(f"{name:12} {alpha:10.1f} {beta:11.3f} {found.error:12.0%}")
    if output:
        Path(output).write_text(json.dumps(profile(result, fits), indent=2) + "\n")
        print(f"profile: {output}; use it with ulysses-mc plan --profile {output}")


def profile(result: Result, fits: dict[str, Fit]) -> dict[str, Any]:
    """The profile: bytes are what a rank sends, seconds the slowest rank's best call."""
    return {
        "backend": result.backend,
        "device": result.device,
        "ranks": result.ranks,
        "nodes": result.nodes,
        "fits": {
            name: {"alpha_seconds": f.alpha, "bytes_per_second": f.beta, "worst_error": f.error}
            for name, f in fits.items()
        },
        "measurements": [
            {"operation": name, "bytes": nbytes, "seconds": seconds}
            for name, points in result.points.items()
            for nbytes, seconds in points
        ],
    }


def _gpus(problems: list[Problem]) -> int:
    try:
        import torch
    except ImportError:
        problems.append(Problem("torch is not installed", "bench needs it", "pip install torch"))
        return 0
    return torch.cuda.device_count()
