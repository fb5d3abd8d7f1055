"""A grid as text that a person can read: a table of its groups, and a drawing of one kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .grid import RankGrid

# The groups of the table: axes and what they are for.
ROWS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("tp",), "tensor parallel: share each weight matrix"),
    (("ulysses",), "share a sequence, exchange heads"),
    (("ring",), "share a sequence, pass keys and values"),
    (("cp",), "share a sequence: ulysses x ring"),
    (("dp",), "data parallel: see different samples"),
    (("dp", "cp"), "average gradients, shard ZeRO states"),
    (("pp",), "pipeline stages"),
    (("tp", "pp"), "one model replica's weights"),
    (("etp",), "share each expert's matrices"),
    (("ep",), "share the experts"),
    (("edp",), "average expert gradients"),
)


def describe_grid(
    grid: RankGrid, rank: int | None = None, owners: Mapping[tuple[str, ...], str] | None = None
) -> str:
    """A table with a line for each kind of group.

    Args:
        grid: sizes and order.
        rank: whose place and group to show; None: the first group of each kind.
        owners: for some axes, who made the group ("Megatron", "ulysses_mc").
    """
    chain = " x ".join(f"{axis} {size}" for axis, size in grid.dense_shape)
    lines = [f"{grid.world_size} ranks = {chain} (fastest-varying first)"]
    if grid.config.has_experts:
        experts = " x ".join(f"{axis} {size}" for axis, size in grid.expert_shape)
        lines.append(f"experts: {grid.world_size} ranks = {experts}")
    if rank is not None:
        places = grid.coordinates(rank)
        lines.append(f"rank {rank}: " + ", ".join(f"{a} {places[a]}" for a, _ in grid.dense_shape))
    lines.append("")
    whose = "first group" if rank is None else f"rank {rank}'s group"
    table = [["group", "size", "count", whose, "made by", "what they do"]]
    for axes, purpose in ROWS:
        if set(axes) & {"etp", "ep", "edp"} and not grid.config.has_experts:
            continue
        size = grid.size(*axes)
        members = grid.group_of(rank or 0, *axes)
        owner = (owners or {}).get(axes, "")
        count = str(grid.world_size // size)
        table.append([" x ".join(axes), str(size), count, short_list(members), owner, purpose])
    if owners is None:
        table = [row[:4] + row[5:] for row in table]
    return "\n".join(lines + _aligned(table))


def draw_groups(
    grid: RankGrid, axes: Sequence[str], *, ranks_per_node: int = 8, max_nodes: int = 8
) -> str:
    """Nodes down, ranks across; each cell is rank:group. Middle nodes are left out.

    Args:
        grid: sizes and order.
        axes: the kind of group to draw.
        ranks_per_node: cells of a line.
        max_nodes: lines drawn at most, half from the top and half from the bottom.
    """
    groups = grid.groups(*axes)
    number = {rank: index for index, group in enumerate(groups) for rank in group}
    nodes = [
        range(start, min(start + ranks_per_node, grid.world_size))
        for start in range(0, grid.world_size, ranks_per_node)
    ]
    spans = [len({rank // ranks_per_node for rank in group}) for group in groups]
    spread = f"{min(spans)}" if min(spans) == max(spans) else f"{min(spans)} to {max(spans)}"
    width = len(str(grid.world_size - 1)), len(str(len(groups) - 1))
    title = (
        f"{' x '.join(axes)}: {_count(len(groups), 'group')} of {_count(len(groups[0]), 'rank')} "
        f"on {_count(len(nodes), 'node')}; a group spans {spread} {_plural(max(spans), 'node')}. "
        "Cells: rank:group"
    )

    def line(index: int) -> str:
        cells = (f"{rank:>{width[0]}}:{number[rank]:<{width[1]}}" for rank in nodes[index])
        return f"node {index:>{len(str(len(nodes) - 1))}} | {' '.join(cells)}".rstrip()

    if len(nodes) <= max_nodes:
        return "\n".join([title, *map(line, range(len(nodes)))])
    top, bottom = max_nodes - max_nodes // 2, max_nodes // 2
    hidden = f"  ... {len(nodes) - max_nodes} nodes more ..."
    tail = range(len(nodes) - bottom, len(nodes))
    return "\n".join([title, *map(line, range(top)), hidden, *map(line, tail)])


def short_list(ranks: Sequence[int], limit: int = 8) -> str:
    """Ranks with commas; of more than `limit`, the first two and the last.

    >>> short_list(range(0, 18, 2)), short_list([0, 1]), short_list([3])
    ('0, 2, ... 16', '0, 1', '3')
    """
    if len(ranks) <= limit:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]}"


def _plural(number: int, noun: str) -> str:
    return noun if number == 1 else f"{noun}s"


def _count(number: int, noun: str) -> str:
    return f"{number} {_plural(number, noun)}"


def _aligned(table: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rows = ("  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)) for row in table)
    lines = [row.rstrip() for row in rows]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]
