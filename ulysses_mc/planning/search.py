"""Every way to divide a job over its GPUs: the best first, and why each other one is out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from .estimate import Estimate
from .hardware import GIB
from .job import RECOMPUTE, Job, Setting
from .memory import Memory, memory
from .rules import Reason, broken_by_variant, broken_rule
from .timing import least_step_seconds

MICRO_BATCHES = (1, 2, 4, 8)
CHUNKS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Limits:
    """What the search may choose; None: anything. Given sizes are kept."""

    tp: int | None = None
    ulysses: int | None = None
    ring: int | None = None
    pp: int | None = None
    vpp: int | None = None
    ep: int | None = None
    micro_batch: int | None = None


@dataclass(frozen=True)
class Dropped:
    """A setting that is out."""

    setting: Setting
    reason: Reason


@dataclass(frozen=True)
class Plan:
    """The outcome of a search."""

    job: Job
    ranked: list[Estimate]
    dropped: list[Dropped]
    seconds: float

    @property
    def best(self) -> Estimate | None:
        return self.ranked[0] if self.ranked else None

    @property
    def considered(self) -> int:
        return len(self.ranked) + len(self.dropped)


@lru_cache(maxsize=4096)
def divisors(n: int) -> tuple[int, ...]:
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return tuple(sorted({*small, *(n // d for d in small)}))


def layouts(job: Job, limits: Limits = Limits()) -> Iterator[Setting]:
    """Every (tp, ulysses, ring, pp, dp), and ep of MoE models, whose product is the GPUs."""

    def choices(total: int, fixed: int | None) -> tuple[int, ...]:
        if fixed is None:
            return divisors(total)
        return (fixed,) if total % fixed == 0 else ()

    for tp in choices(job.num_gpus, limits.tp):
        for pp in choices(job.num_gpus // tp, limits.pp):
            for ulysses in choices(job.num_gpus // (tp * pp), limits.ulysses):
                rest = job.num_gpus // (tp * pp * ulysses)
                for ring in choices(rest, limits.ring):
                    base = Setting(tp=tp, pp=pp, ulysses=ulysses, ring=ring, dp=rest // ring)
                    for ep in _expert_sizes(job, base, limits):
                        yield base if ep == 1 else replace(base, ep=ep)


def _expert_sizes(job: Job, base: Setting, limits: Limits) -> tuple[int, ...]:
    if not job.model.moe:
        return (1,)
    if limits.ep is not None:
        return (limits.ep,)
    ranks = base.tp * base.cp * base.dp
    return tuple(n for n in divisors(job.model.moe.num_experts) if ranks % n == 0)


def search(job: Job, limits: Limits = Limits()) -> Plan:
    """All layouts, each with the fastest micro-batch, chunks and recompute that fit."""
    start, ranked, dropped = time.perf_counter(), [], []
    last: tuple[Setting, Reason] | None = None  # a layout that breaks a rule whatever its ep
    for layout in layouts(job, limits):
        if last and replace(layout, ep=last[0].ep) == last[0]:
            dropped.append(Dropped(layout, last[1]))
            continue
        best = best_of_layout(job, layout, limits)
        if isinstance(best, Reason):
            dropped.append(Dropped(layout, best))
            last = None if best.kind in ("memory", "experts") else (layout, best)
        else:
            ranked.append(best)
            last = None
    ranked.sort(key=lambda estimate: (estimate.seconds, _plainness(estimate.setting)))
    return Plan(job, ranked, dropped, time.perf_counter() - start)


def _plainness(setting: Setting) -> tuple[int, ...]:
    """Among equals, the fewest kinds of parallelism, data parallelism first."""
    sizes = (setting.pp, setting.ring, setting.tp, setting.ulysses, setting.ep)
    return (sum(size > 1 for size in sizes), *sizes)


def best_of_layout(job: Job, layout: Setting, limits: Limits = Limits()) -> Estimate | Reason:
    """The fastest variant of a layout that fits, or why none does."""
    micros: tuple[int, ...] = MICRO_BATCHES
    if limits.micro_batch is not None:
        micros = (limits.micro_batch,)
    first = replace(layout, micro_batch=micros[0], vpp=limits.vpp or 1)
    reason = broken_rule(job, first)
    if reason and not (reason.kind == "layers" and limits.vpp is None):
        return reason
    tightest: Reason | None = reason
    fitting: list[Fit] = []
    chunks = (1,) if layout.pp == 1 else CHUNKS if limits.vpp is None else (limits.vpp,)
    for vpp in chunks:
        for micro in micros:
            variant = replace(layout, vpp=vpp, micro_batch=micro)
            if broken_by_variant(job, variant):
                continue
            found = _cheapest_recompute(job, variant)
            if isinstance(found, Reason):
                tightest = tightest if tightest and tightest.kind == "memory" else found
                if vpp == 1:  # any number of chunks takes more (of chunks, 2 take the most)
                    micros = tuple(size for size in micros if size < micro)
                break  # a larger micro-batch takes more
            fitting.append(found)
    if fitting:
        return _fastest(job, fitting)
    assert tightest is not None
    return tightest


Fit = tuple[Setting, Memory]


def _fastest(job: Job, fitting: list[Fit]) -> Estimate:
    """The first of the fastest; the likely ones are timed first, to spare the others."""
    best, place = None, 0
    bounds = [least_step_seconds(job, setting) for setting, _ in fitting]
    for index in sorted(range(len(fitting)), key=bounds.__getitem__):
        if best and bounds[index] > best.seconds:
            break
        found = Estimate.of(job, *fitting[index])
        if best is None or (found.seconds, index) < (best.seconds, place):
            best, place = found, index
    assert best is not None
    return best


def _cheapest_recompute(job: Job, variant: Setting) -> Fit | Reason:
    """The variant with the least recomputation that fits. Selective is nothing with flash."""
    choices = [c for c in RECOMPUTE if c in job.recompute]
    if job.attention == "flash" and len(choices) > 1:
        choices = [c for c in choices if c != "selective"] or choices
    for choice in choices:
        setting = variant.with_recompute(choice)
        used = memory(job, setting)
        if used.total <= job.gpu.memory:
            return setting, used
    largest = max(used.parts().items(), key=lambda part: part[1])
    return Reason(
        "memory",
        f"needs {used.total / GIB:.1f} GiB of {job.gpu.memory / GIB:.1f} with recompute "
        f"{setting.recompute}: {largest[0]} {largest[1] / GIB:.1f} GiB",
    )


def fits_any(job: Job, limits: Limits = Limits()) -> Setting | None:
    """A setting that fits, if there is one: the leanest variant of each layout is tried."""
    choice = [c for c in RECOMPUTE if c in job.recompute][-1]
    micro = limits.micro_batch or 1
    for layout in layouts(job, limits):
        if layout.tp > job.gpu.gpus_per_node and limits.tp is None:
            continue  # it would fit, and nobody would wait for it
        setting = replace(layout, micro_batch=micro, vpp=limits.vpp or 1, recompute=choice)
        if not broken_rule(job, setting) and memory(job, setting).total <= job.gpu.memory:
            return setting
    return None
