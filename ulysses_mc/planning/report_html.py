"""A plan as one self-contained HTML page: no script, no font, no picture from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .. import __version__
from .advice import advice, why_slower
from .estimate import Estimate
from .hardware import GIB
from .html_style import MEMORY_COLORS, STYLE, TIME_COLORS
from .job import head_layout
from .numbers import short
from .rank_picture import rank_grid
from .report_table import dropped_summary
from .search import Plan
from .traffic import bytes_per_step

MAX_DROPPED = 400  # lines of the page's last table


def html_page(plan: Plan, *, top: int = 5) -> str:
    """The page.

    Args:
        plan: with at least one setting that fits.
        top: settings that get bars.
    """
    best = plan.best
    assert best is not None
    job, estimates = plan.job, plan.ranked[:top]
    title = f"{job.model.name} on {job.num_gpus} x {job.gpu.name}"
    sections = [
        f"<h1>{escape(title)}</h1>",
        _subtitle(plan),
        _cards(best),
        "<h2>Best settings</h2>" + _ranking(estimates, best),
        "<h2>Remarks</h2><ul>" + "".join(f"<li>{escape(x)}</li>" for x in advice(plan)) + "</ul>",
        "<h2>Memory of the fullest GPU</h2>" + _memory_bars(estimates),
        "<h2>Step time</h2>" + _time_bars(estimates),
        "<h2>Bytes sent per GPU and step</h2>" + _traffic(best),
        "<h2>Heads after the exchange</h2>" + _heads(best),
        "<h2>Ranks on nodes</h2>" + rank_grid(best),
        "<h2>Settings that were dropped</h2>" + _dropped(plan, top),
        "<footer>Estimates of ulysses-mc "
        f"{escape(__version__)}: formulas, sources and errors against published numbers are in "
        "docs/planning.md.</footer>",
    ]
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>"
        + "\n".join(sections)
        + "</main></body></html>\n"
    )


def _subtitle(plan: Plan) -> str:
    job = plan.job
    words = [
        f"{job.seq_length:,} tokens",
        f"global batch {job.global_batch_size:,}",
        f"{job.gpu.gpus_per_node} GPUs per node",
        f"{job.gpu.memory / GIB:.1f} GiB each",
        job.precision,
        f"{plan.considered:,} layouts searched, {len(plan.ranked):,} fit",
    ]
    return f'<p class="sub">{escape(" · ".join(words))}</p>'


def _cards(best: Estimate) -> str:
    cards = (
        (best.setting.label(), "best setting"),
        (f"{short(best.seconds)} s", "per step"),
        (f"{best.tokens_per_second:,.0f}", "tokens/s"),
        (f"{best.mfu:.1%}", "MFU"),
        (f"{best.memory.total / GIB:.1f} GiB", "per GPU, with margin"),
    )
    items = (
        f'<div class="card"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for value, name in cards
    )
    return f'<div class="cards">{"".join(items)}</div>'


def _ranking(estimates: list[Estimate], best: Estimate) -> str:
    rows = []
    for index, e in enumerate(estimates, 1):
        note = "; ".join(e.notes) if e is best else why_slower(e, best)
        cells = (str(index), e.setting.label(), str(e.setting.micro_batch), e.setting.recompute,
                 f"{e.memory.total / GIB:.1f}", short(e.seconds),
                 f"{e.tokens_per_second_per_gpu:,.0f}", f"{e.mfu:.1%}", note)  # fmt: skip
        rows.append(cells)
    head = ("#", "setting", "micro-batch", "recompute", "GiB", "step s", "tokens/s/GPU", "MFU",
            "why")  # fmt: skip
    return _table(head, rows, right=(0, 2, 4, 5, 6, 7))


def _table(
    head: tuple[str, ...], rows: Sequence[tuple[str, ...]], right: tuple[int, ...] = ()
) -> str:
    def cell(tag: str, index: int, text: str) -> str:
        side = ' class="r"' if index in right else ""
        return f"<{tag}{side}>{escape(text)}</{tag}>"

    top = "".join(cell("th", i, text) for i, text in enumerate(head))
    body = "".join(
        "<tr>" + "".join(cell("td", i, text) for i, text in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div>'


def _bars(
    rows: list[tuple[str, dict[str, float], str]], colors: dict[str, str], full: float, mark: float
) -> str:
    """Stacked bars; `full` is the width of the longest, `mark` a line across all of them (0: none).

    Args:
        rows: label, parts, and the text behind the bar.
    """
    used = [name for name in colors if any(parts.get(name, 0) > 0 for _, parts, _ in rows)]
    legend = "".join(
        f'<span><i style="background:{colors[name]}"></i>{escape(name.replace("_", " "))}</span>'
        for name in used
    )
    lines = []
    for label, parts, text in rows:
        pieces = "".join(
            f'<i style="width:{100 * parts[name] / full:.3f}%;background:{colors[name]}" '
            f'title="{escape(name.replace("_", " "))}: {short(parts[name])}"></i>'
            for name in used
            if parts.get(name, 0) > 0
        )
        line = f'<u style="left:{100 * mark / full:.2f}%"></u>' if mark else ""
        lines.append(
            f'<div class="bar"><label>{escape(label)}</label><div class="track">{pieces}{line}'
            f"</div><em>{escape(text)}</em></div>"
        )
    return f'<div class="legend">{legend}</div>{"".join(lines)}'


def _memory_bars(estimates: list[Estimate]) -> str:
    limit = estimates[0].job.gpu.memory / GIB
    rows = [
        (
            e.setting.label(),
            {name: size / GIB for name, size in e.memory.parts().items()},
            f"{e.memory.total / GIB:.1f} GiB",
        )
        for e in estimates
    ]
    note = f'<p class="note">The line is the GPU: {limit:.1f} GiB.</p>'
    return _bars(rows, MEMORY_COLORS, limit * 1.02, limit) + note


def _time_bars(estimates: list[Estimate]) -> str:
    longest = max(e.seconds for e in estimates)
    rows = [(e.setting.label(), e.time.parts(), f"{short(e.seconds)} s") for e in estimates]
    note = '<p class="note">Communication that runs behind computation is left out.</p>'
    return _bars(rows, TIME_COLORS, longest, 0.0) + note


def _traffic(best: Estimate) -> str:
    rows = [
        (kind, short(sides["intra"] / 1e9), short(sides["inter"] / 1e9))
        for kind, sides in bytes_per_step(best.job, best.setting).items()
    ]
    gpu = best.job.gpu
    head = ("by", f"{gpu.intra.name}, GB", f"{gpu.inter.name}, GB")
    return _table(head, rows, right=(1, 2)) if rows else "<p>Nothing: one GPU.</p>"


def _heads(best: Estimate) -> str:
    layout = head_layout(best.job.model, best.setting.tp, best.setting.ulysses)
    assert not isinstance(layout, Exception)
    rows = [
        (str(rank), _run(query), _run(kv))
        for rank, (query, kv) in enumerate(zip(layout.query_heads, layout.kv_heads, strict=True))
    ]
    text = f"<p>{escape(best.heads)}</p>"
    head = ("Ulysses rank", "query heads", "key/value heads")
    table = _table(head, rows)
    if len(rows) > 8:
        table = f"<details><summary>All {len(rows)} ranks</summary>{table}</details>"
    return text + table


def _run(heads: range) -> str:
    if not heads:
        return "none"
    last = heads.stop - 1
    return str(heads.start) if len(heads) == 1 else f"{heads.start} to {last} ({len(heads)})"


def _dropped(plan: Plan, top: int) -> str:
    summary = "".join(f"<li>{escape(line)}</li>" for line in dropped_summary(plan)[:-1])
    rows = [(d.setting.label(), d.reason.line) for d in plan.dropped]
    assert plan.best is not None
    rows += [(e.setting.label(), why_slower(e, plan.best)) for e in plan.ranked[top:]]
    more = len(rows) - MAX_DROPPED
    note = f"<p class='note'>{more:,} more: --json has them all.</p>" if more > 0 else ""
    table = _table(("setting", "reason"), rows[:MAX_DROPPED])
    each = f"<details><summary>Each, with its reason</summary>{table}{note}</details>"
    return f"<ul>{summary}</ul>{each}"
