"""The tables: for a terminal, as Markdown, and whether the target is met."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .contenders import FLOOR, NOT_PEERS, OURS

TARGET = 1.5  # forward + backward over the floor, without attention, local Q of 2 MiB and more
COLUMNS = (
    "exchanges",
    "bytes / bound",
    "copies",
    "peak memory",
    "fwd",
    "fwd + bwd",
    "CPU time",
    "ms",
)
LEGEND = (
    "exchanges: collectives or messages under way together per layer and step. bytes / bound: "
    "received by all ranks over the least possible. copies, peak memory: in units of the local Q, "
    "forward and backward, outside the local attention. fwd, fwd + bwd, CPU time: over the floor "
    "of the same round, median. ms: forward + backward."
)


def cells(row: dict[str, Any]) -> list[str]:
    if row["refuses"]:
        return [f"refuses: {row['refuses']}"]
    prepared = row["name"] in NOT_PEERS[:2]  # its buffers were allocated beforehand
    return [
        str(row["exchanges"]),
        f"{row['bytes_ratio']:.2f}",
        f"{row['copies']:.1f}",
        "prepared" if prepared else f"{row['memory']:.1f}",
        f"{row['forward']:.2f}",
        f"{row['both']:.2f}",
        f"{row['cpu']:.2f}",
        f"{row['milliseconds']:.1f}",
    ]


def verdict(rows: list[dict[str, Any]], attention: str) -> str:
    """How ours stands against the target and the peers of this table."""
    running = {row["name"]: row for row in rows if not row["refuses"]}
    if OURS[0] not in running or FLOOR not in running:
        return ""
    mine = running[OURS[0]]["both"]
    peers = {name: row["both"] for name, row in running.items() if name not in NOT_PEERS}
    text = f"{OURS[0]}: {mine:.2f} x the floor"
    if attention == "none":
        text += f" ({'within' if mine <= TARGET else 'above'} the target of {TARGET})"
    if peers:
        best = min(peers, key=lambda name: peers[name])
        standing = "ahead of" if mine < peers[best] else "behind"
        text += f"; {standing} the best other library ({best}, {peers[best]:.2f})"
    return text + "."


def print_tables(tables: list[dict[str, Any]], console: Console) -> None:
    for number, table in enumerate(tables):
        grid = Table(title=table["title"], title_justify="left")
        grid.add_column("", no_wrap=True)
        for column in COLUMNS:
            grid.add_column(column, justify="right")
        refusals = []
        for row in table["rows"]:
            values = cells(row)
            if len(values) == 1:
                refusals.append(f"{row['name']} {values[0]}")
                values = ["refuses"] + ["-"] * (len(COLUMNS) - 1)
            grid.add_row(row["name"], *values)
        console.print(grid)
        for line in [*refusals, verdict(table["rows"], table["case"]["attention"])]:
            console.print(line, highlight=False)
        if number == len(tables) - 1:
            console.print(LEGEND, highlight=False)
        console.print()


def markdown(tables: list[dict[str, Any]]) -> str:
    lines = []
    for table in tables:
        lines += [f"### {table['title']}", "", "| | " + " | ".join(COLUMNS) + " |"]
        lines += ["|---|" + "---:|" * len(COLUMNS)]
        for row in table["rows"]:
            values = cells(row)
            values += [""] * (len(COLUMNS) - len(values))
            lines.append(f"| {row['name']} | " + " | ".join(values) + " |")
        lines += ["", verdict(table["rows"], table["case"]["attention"]), ""]
    return "\n".join(lines)


BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def write_markdown(path: Path, text: str) -> None:
    """Writes a file of its own, or renews the part between the marks of an existing one."""
    if path.exists() and BEGIN in (old := path.read_text()) and END in old:
        before, _, rest = old.partition(BEGIN)
        text = f"{before}{BEGIN}\n\n{text.strip()}\n\n{END}{rest.partition(END)[2]}"
    path.write_text(text)
