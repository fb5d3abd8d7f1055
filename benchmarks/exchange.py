"""Measures the exchange against its floor and other libraries, on CPU ranks over gloo.

    python benchmarks/exchange.py                     # spawns 2, then 4 ranks; some minutes
    python benchmarks/exchange.py --quick             # small shapes, few rounds: does it run?
    torchrun --nproc-per-node 4 benchmarks/exchange.py

All contenders of a table run in one set of processes, one after the other in every round.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces every start and stop
# The ranks' C library keeps freed memory, as allocators of GPU memory do: for all contenders.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**30))
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**31))
os.environ.setdefault("MALLOC_TOP_PAD_", str(2**28))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console

from benchmarks.cases import Case, default_cases
from benchmarks.contenders import CONTENDERS, FLOOR
from benchmarks.report import markdown, print_tables, write_markdown


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="group sizes")
    parser.add_argument("--sizes", type=float, nargs="+", default=[2, 8], help="local Q, MiB")
    parser.add_argument("--sdpa-size", type=float, default=2, help="local Q around SDPA, 0 = none")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="2 ranks, 64 KiB, 2 rounds")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument(
        "--markdown", type=Path, help="write the tables here, or between the marks that are there"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.ranks, options.sizes, options.rounds = [2], [0.0625], 2
        options.sdpa_size = min(options.sdpa_size, 0.0625)
    names = options.contenders or list(CONTENDERS)
    options.contenders = [FLOOR, *(name for name in names if name != FLOOR)]
    return options


def run_cases(cases: list[Case], names: list[str], rounds: int) -> list[dict[str, Any]]:
    from benchmarks.measure import measure

    torch.set_num_threads(1)
    tables = []
    for case in cases:
        # Around a real attention the exchange is a small part: fewer, longer rounds.
        rows = measure(case, names, rounds if case.attention == "none" else max(2, rounds // 2))
        tables.append({"title": case.title, "case": asdict(case), "rows": rows})
        if dist.get_rank() == 0:
            print(f"measured: {case.title}", file=sys.stderr, flush=True)
    return tables


def without_preemption() -> None:
    """A thread that receives does not interrupt one that packs or sends: for all contenders.

    Needs no privileges; `chrt -b 0 command` does the same. Before any thread is started.
    """
    if hasattr(os, "SCHED_BATCH"):  # Linux
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _rank_main(rank: int, options: argparse.Namespace, ranks: int, folder: str) -> None:
    without_preemption()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store{ranks}", rank=rank, world_size=ranks
    )
    try:
        cases = list(default_cases(ranks, options.sizes, options.sdpa_size))
        tables = run_cases(cases, options.contenders, options.rounds)
        if rank == 0:
            Path(folder, f"{ranks}.json").write_text(json.dumps(tables))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def spawn(options: argparse.Namespace) -> list[dict[str, Any]]:
    tables = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in options.ranks:
            mp.spawn(_rank_main, (options, ranks, folder), nprocs=ranks)
            tables += json.loads(Path(folder, f"{ranks}.json").read_text())
    return tables


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if "RANK" in os.environ:  # torchrun
        without_preemption()
        dist.init_process_group("gloo")
        cases = default_cases(dist.get_world_size(), options.sizes, options.sdpa_size)
        tables = run_cases(list(cases), options.contenders, options.rounds)
        rank = dist.get_rank()
        dist.destroy_process_group()
        if rank:
            return
    else:
        tables = spawn(options)
    console = Console(width=None if sys.stdout.isatty() else 130)
    print_tables(tables, console)
    if options.json:
        options.json.write_text(json.dumps(tables, indent=1))
    if options.markdown:
        write_markdown(options.markdown, markdown(tables))


if __name__ == "__main__":
    main()
