"""What a person should be told beside the numbers, and what would make the impossible possible."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import lcm

from .estimate import Estimate
from .hardware import GIB
from .job import Job, Setting
from .memory import memory
from .numbers import short
from .problems import Problem
from .rules import broken_rule, nearest_settings
from .search import Dropped, Limits, Plan, divisors, fits_any, layouts
from .traffic import crossover

NO_LIMITS = Limits()


def advice(plan: Plan) -> list[str]:
    """Remarks on the best setting: which of ring and Ulysses wins, TP, data parallelism."""
    best = plan.best
    if best is None:
        return []
    return [
        *_ring_is_megatrons(best, plan),
        *_ring_or_ulysses(best),
        *_tensor_parallel(best, plan),
        *_data_parallel(best, plan),
        *_logits(best),
    ]


def _logits(best: Estimate) -> Iterator[str]:
    share = best.memory.logits / best.memory.total
    if share > 0.2:
        yield (
            f"logits take {share:.0%} of the memory ({best.memory.logits / GIB:.1f} GiB): "
            "--tiled-logits, with a loss in pieces, frees it"
        )


def _ring_is_megatrons(best: Estimate, plan: Plan) -> Iterator[str]:
    """Who runs the best setting: this package has no ring attention."""
    if best.setting.ring == 1:
        return
    ours = next((e for e in plan.ranked if e.setting.ring == 1), None)
    line = "ring is stock Megatron's (p2p, a2a+p2p), this package has none"
    if ours is None:
        yield f"{line}; nothing fits without ring"
        return
    place = plan.ranked.index(ours) + 1
    ratio = ours.seconds / best.seconds
    yield f"{line}: its best is number {place}, {ours.setting.label()}, {ratio:.2f}x the time"


def _ring_or_ulysses(best: Estimate) -> Iterator[str]:
    setting = best.setting
    if setting.cp == 1:
        return
    ulysses, ring = crossover(best.job, setting)
    layer = "per layer and micro-batch, forward and backward"
    if ulysses == float("inf"):
        heads = best.job.model.num_attention_heads // setting.tp
        yield (
            f"{setting.cp} ranks share a sequence and a tensor-parallel rank has {heads} query "
            f"heads: Ulysses alone cannot, ring takes the rest ({short(ring / 1e9)} GB {layer})"
        )
        return
    few, many = sorted((("ring", ring), ("Ulysses", ulysses)), key=lambda pair: pair[1])
    word = "as many" if many[1] < 1.005 * few[1] else "fewer"
    than = "as" if word == "as many" else "than"
    yield (
        f"{few[0]} moves {word} bytes {than} {many[0]} over these {setting.cp} ranks: "
        f"{short(few[1] / 1e9)} against {short(many[1] / 1e9)} GB {layer}"
        + (", and hides them behind attention" if few[0] == "ring" else "")
    )


def _tensor_parallel(best: Estimate, plan: Plan) -> Iterator[str]:
    node, tp = plan.job.gpu.gpus_per_node, best.setting.tp
    if tp > node:
        yield f"tensor parallelism {tp} crosses the node of {node} GPUs: every layer waits for it"
    elif best.setting.tp * best.setting.ulysses > node:
        yield (
            f"tp {tp} x ulysses {best.setting.ulysses} crosses the node of {node}: the exchange "
            "takes the slower link"
        )


def _data_parallel(best: Estimate, plan: Plan) -> Iterator[str]:
    plain = next((e for e in plan.ranked if e.setting.cp == 1), None)
    if best.setting.cp == 1:
        setting = best.setting
        sizes = {"data": setting.dp, "tensor": setting.tp, "pipeline": setting.pp}
        kind = next((name for name, size in sizes.items() if size > 1), "")
        does = f"{kind} parallelism does here" if kind else "one GPU does"
        yield f"the sequence fits without Ulysses or ring: {does}"
    elif plain is not None:
        ratio = plain.seconds / best.seconds
        would = (
            "data parallelism would do" if plain.setting.dp > 1 and ratio <= 1.05 else "it works"
        )
        yield f"{would} without dividing sequences: {plain.setting.label()}, {ratio:.2f}x the time"


def why_slower(estimate: Estimate, best: Estimate) -> str:
    """The part of the step that costs the most against the best, in one line."""
    ours, theirs = estimate.time.parts(), best.time.parts()
    part = max(ours, key=lambda name: ours[name] - theirs[name])
    ratio = estimate.seconds / best.seconds
    line = (
        f"{ratio:.2f}x the best's time: {part} {short(ours[part])} against {short(theirs[part])} s"
    )
    return "; ".join([line, *estimate.notes])


# -- one option each: the longest sequence, the fewest GPUs ----------------------------------------


def longest_sequence(job: Job, limits: Limits = NO_LIMITS) -> tuple[int, Setting] | None:
    """The most tokens that fit on the job's GPUs, and the setting; None if nothing does.

    Counted in steps of 1,024 tokens or of what every layout's token order divides.
    """
    unit = lcm(1024, 2 * job.num_gpus)

    def setting_for(blocks: int) -> Setting | None:
        return fits_any(replace(job, seq_length=blocks * unit), limits)

    if setting_for(1) is None:
        return None
    low, high = 1, 2
    while high < 1 << 24 and setting_for(high) is not None:
        low, high = high, 2 * high
    while high - low > max(low // 64, 1):  # to 2%: the estimate is no better
        middle = (low + high) // 2
        low, high = (middle, high) if setting_for(middle) is not None else (low, middle)
    found = setting_for(low)
    return None if found is None else (low * unit, found)


def fewest_gpus(job: Job, limits: Limits = NO_LIMITS) -> tuple[int, Setting] | None:
    """The fewest GPUs, whole nodes from one node up, on which the job fits; None: over 65,536."""
    node = job.gpu.gpus_per_node
    counts = [n for n in divisors(node)]
    counts += [node * k for i in range(1, 14) for k in (2**i, 3 * 2 ** (i - 1))]
    for count in sorted(set(counts)):
        if count > 65536:
            break
        found = fits_any(replace(job, num_gpus=count), limits)
        if found is not None:
            return count, found
    return None


# -- when nothing fits -----------------------------------------------------------------------------


def remedies(plan: Plan, limits: Limits = NO_LIMITS) -> list[str]:
    """What would make an impossible request possible, each tried by the same search."""
    job = plan.job
    changes: list[tuple[str, Job]] = []
    if "full" not in job.recompute:
        changes.append(("allow full recompute", replace(job, recompute=(*job.recompute, "full"))))
    full = replace(job, recompute=("full",))
    changes += [
        ("--tiled-logits", replace(full, tiled_logits=True)),
        ("--zero 3", replace(full, zero_stage=3)),
        ("--offload-optimizer", replace(full, offload_optimizer=True)),
        ("--zero 3 --tiled-logits", replace(full, zero_stage=3, tiled_logits=True)),
        (
            "--zero 3 --tiled-logits --tiled-mlp --offload-optimizer --offload-checkpoints",
            replace(full, zero_stage=3, tiled_logits=True, tiled_mlp=True, offload_optimizer=True,
                    offload_checkpoints=True),
        ),
    ]  # fmt: skip
    found = []
    for words, changed in changes:
        setting = fits_any(changed, limits)
        if setting is not None:
            found.append(f"{words} ({setting.label()})")
            if len(found) == 2:
                break
    gpus = fewest_gpus(full, limits)
    if gpus is not None and gpus[0] > job.num_gpus:
        found.append(f"{gpus[0]} GPUs ({gpus[1].label()})")
    longest = longest_sequence(full, limits)
    if longest is not None and longest[0] < job.seq_length:
        found.append(f"sequences of {longest[0]:,} tokens ({longest[1].label()})")
    return found + _batch_remedy(plan)


def _batch_remedy(plan: Plan) -> list[str]:
    blocked = [d for d in plan.dropped if d.reason.kind == "batch"]
    if not blocked or len(blocked) < len(plan.dropped) / 2:
        return []
    least = min(d.setting.dp for d in blocked)
    above = -(-plan.job.global_batch_size // least) * least
    return [f"a global batch of {above}"]


def broken_by_all(plan: Plan) -> list[Problem]:
    """Where every layout breaks a rule, memory aside: a problem for each rule, with what works."""
    if any(d.reason.kind == "memory" for d in plan.dropped):
        return []
    first: dict[str, Dropped] = {}
    for dropped in plan.dropped:
        first.setdefault(dropped.reason.kind, dropped)
    where = f"of {plan.considered} layouts of {plan.job.num_gpus} GPUs none works"
    return [
        Problem(f"{where}, as {d.setting.label()}", d.reason.line,
                nearest_settings(plan.job, d.setting, kind))
        for kind, d in first.items()
    ]  # fmt: skip


def closest_miss(job: Job, limits: Limits = NO_LIMITS) -> str:
    """The setting that comes nearest to fitting, in one line."""
    best: tuple[float, Setting] | None = None
    choice = job.recompute[-1]
    for layout in layouts(job, limits):
        setting = replace(layout, recompute=choice, vpp=limits.vpp or 1,
                          micro_batch=limits.micro_batch or 1)  # fmt: skip
        if broken_rule(job, setting):
            continue
        total = memory(job, setting).total
        if best is None or total < best[0]:
            best = total, setting
    if best is None:
        return "no division of these GPUs meets the rules"
    parts = memory(job, best[1]).parts()
    shown = ", ".join(
        f"{name} {size / GIB:.1f}"
        for name, size in sorted(parts.items(), key=lambda part: -part[1])
        if size > 0.05 * best[0]
    )
    return (
        f"nearest: {best[1].label()} needs {best[0] / GIB:.1f} GiB of "
        f"{job.gpu.memory / GIB:.1f} ({shown})"
    )
