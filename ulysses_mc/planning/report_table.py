"""A plan as tables for people, with rich."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from .advice import advice, why_slower
from .estimate import Estimate
from .hardware import GIB
from .numbers import short
from .problems import Problem, RequestError
from .search import Plan
from .traffic import bytes_per_step

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table


def console(**options: Any) -> Console:
    """A rich console.

    Raises:
        RequestError: rich is not installed; says which extra has it.
    """
    try:
        from rich.console import Console

        class PipeConsole(Console):
            def on_broken_pipe(self) -> None:  # rich's own ends the process with 1
                raise BrokenPipeError

    except ImportError:
        raise RequestError(
            [
                Problem(
                    "rich is not installed",
                    "tables need it",
                    "pip install 'ulysses-mc[plan]'; or --json, which needs nothing",
                )
            ]
        ) from None
    out = PipeConsole(**options)
    # A file or a pipe has no width of its own: whole words matter more than 80 columns.
    return out if out.is_terminal else PipeConsole(**{"width": 160, **options})


def print_plan(plan: Plan, out: Console, *, top: int, show_dropped: bool) -> None:
    """The best settings, the best one in detail, remarks, and what was dropped."""
    job = plan.job
    model = job.model
    head = (
        f"{model.name} ({model.total_parameters / 1e9:.4g}B) · {job.seq_length:,} tokens · global "
        f"batch {job.global_batch_size} · {job.num_gpus} x {job.gpu.name} "
        f"({job.gpu.memory / GIB:.1f} GiB, {job.gpu.gpus_per_node} per node) · {job.precision}"
    )
    out.print(head, highlight=False, style="bold")
    if job.gpu.profile:
        out.print(f"links: {job.gpu.profile}")
    out.print(
        f"{plan.considered:,} layouts in {plan.seconds:.2f} s: {len(plan.ranked):,} fit, "
        f"{len(plan.dropped):,} dropped",
        highlight=False,
    )
    if plan.best is None:
        return
    out.print(_ranking(plan.ranked[:top], plan))
    out.print(_details(plan.best))
    for line in advice(plan):
        out.print(f"• {line}", highlight=False)
    if show_dropped:
        out.print(_all_dropped(plan))
        out.print(_slower(plan, top))
    else:
        for line in dropped_summary(plan):
            out.print(line, highlight=False)


def dropped_summary(plan: Plan) -> list[str]:
    """One line for each kind of reason: how many settings, and an example."""
    counts = Counter(d.reason.kind for d in plan.dropped)
    lines = []
    for kind, count in counts.most_common():
        example = next(d for d in plan.dropped if d.reason.kind == kind)
        lines.append(
            f"dropped for {kind}: {count:,}, as {example.setting.label()}: {example.reason.line}"
        )
    return lines + (["--dropped lists each with its reason"] if lines else [])


def _ranking(estimates: list[Estimate], plan: Plan) -> Table:
    from rich.table import Table

    table = Table(title="best settings first", title_justify="left", show_edge=False)
    names = ("#", "setting", "micro", "recompute", "GiB/GPU", "step s", "tokens/s", "/GPU", "MFU",
             "heads")  # fmt: skip
    for name in names:
        left = name in ("setting", "recompute", "heads")
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "heads")
    for index, e in enumerate(estimates, 1):
        table.add_row(
            str(index), e.setting.label(), str(e.setting.micro_batch), e.setting.recompute,
            f"{e.memory.total / GIB:.1f}", short(e.seconds), f"{e.tokens_per_second:,.0f}",
            f"{e.tokens_per_second_per_gpu:,.0f}", f"{e.mfu:.1%}", e.heads,
        )  # fmt: skip
    return table


def _details(best: Estimate) -> RenderableType:
    from rich.columns import Columns
    from rich.table import Table

    memory = Table(title="memory of the fullest GPU", show_edge=False)
    memory.add_column("part")
    memory.add_column("GiB", justify="right")
    for name, size in best.memory.parts().items():
        memory.add_row(name.replace("_", " "), f"{size / GIB:.2f}")
    memory.add_row("total", f"{best.memory.total / GIB:.2f}", style="bold")
    time = Table(title="step time", show_edge=False)
    time.add_column("part")
    time.add_column("s", justify="right")
    time.add_column("%", justify="right")
    for name, seconds in best.time.parts().items():
        if seconds > 0:
            time.add_row(name, short(seconds), f"{seconds / best.seconds:.1%}")
    time.add_row("total", short(best.seconds), "", style="bold")
    links = Table(title="sent per GPU and step", show_edge=False)
    links.add_column("by")
    links.add_column(f"{best.job.gpu.intra.name} GB", justify="right")
    links.add_column(f"{best.job.gpu.inter.name} GB", justify="right")
    for kind, sides in bytes_per_step(best.job, best.setting).items():
        links.add_row(kind, short(sides["intra"] / 1e9), short(sides["inter"] / 1e9))
    return Columns([memory, time, links], padding=(0, 4))


def _all_dropped(plan: Plan) -> Table:
    from rich.table import Table

    table = Table(title="dropped", title_justify="left", show_edge=False)
    table.add_column("setting", no_wrap=True)
    table.add_column("reason")
    for dropped in plan.dropped:
        table.add_row(dropped.setting.label(), dropped.reason.line)
    return table


def _slower(plan: Plan, top: int) -> Table:
    from rich.table import Table

    table = Table(title="slower", title_justify="left", show_edge=False)
    table.add_column("setting", no_wrap=True)
    table.add_column("reason")
    assert plan.best is not None
    for estimate in plan.ranked[top:]:
        table.add_row(estimate.setting.label(), why_slower(estimate, plan.best))
    return table
