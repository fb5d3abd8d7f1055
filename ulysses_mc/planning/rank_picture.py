"""The rank grid drawn on nodes, as SVG."""

from __future__ import annotations

from html import escape

from ..parallel_state import RankGrid
from .estimate import Estimate

CELL_WIDTH, CELL_HEIGHT, GAP, PAD, LABEL = 104, 50, 6, 8, 64
MAX_NODES = 8
COLUMNS = 8  # cells of a line; a domain of 72 takes nine lines
AXES = ("tp", "ulysses", "ring", "dp", "pp")
# One fill for each (data, pipeline) place: ranks of a colour work on the same sequence and layers.
FILLS = ("#9ec5f0", "#f3c58b", "#a6d9bb", "#e9a8a0", "#cdb9ea", "#f0dd96", "#e6b3cf", "#bcc5cf")


def rank_grid(estimate: Estimate) -> str:
    """Nodes down, GPUs across; bold outlines are rank 0's Ulysses group."""
    grid = RankGrid(estimate.setting.parallel_config(), estimate.job.num_gpus)
    node = estimate.job.gpu.gpus_per_node
    count = -(-grid.world_size // node)
    shown = [*range(min(count, MAX_NODES))]
    if count > MAX_NODES:
        shown = [*range(MAX_NODES // 2), *range(count - MAX_NODES // 2, count)]
    marked = set(grid.group_of(0, "ulysses")) if grid.size("ulysses") > 1 else set()
    lines = -(-min(node, grid.world_size) // COLUMNS)
    height = lines * (CELL_HEIGHT + GAP) - GAP + 2 * PAD
    columns = min(node, grid.world_size, COLUMNS)
    width = LABEL + columns * (CELL_WIDTH + GAP) + 2 * PAD
    parts, y = [], 0
    for place, index in enumerate(shown):
        if place and index != shown[place - 1] + 1:
            hidden = index - shown[place - 1] - 1
            parts.append(
                f'<text class="dim" x="{LABEL}" y="{y + 14}">… {hidden:,} more nodes …</text>'
            )
            y += 24
        parts.append(_node(grid, index, node, y, width, height, marked))
        y += height + GAP
    svg = (
        f'<svg viewBox="0 0 {width + 2} {y + 2}" width="{width + 2}" role="img" '
        f'aria-label="ranks on nodes">{"".join(parts)}</svg>'
    )
    return _caption(grid, bool(marked)) + svg


def _caption(grid: RankGrid, marked: bool) -> str:
    sizes = " x ".join(f"{axis} {size}" for axis, size in grid.dense_shape if size > 1) or "1 rank"
    text = (
        f"{grid.world_size:,} ranks = {sizes}, the fastest-varying first. Ranks of a colour share "
        "data and pipeline place."
    )
    if marked:
        text += " Bold outlines: the Ulysses group of rank 0."
    return f"<p>{escape(text)}</p>"


def _node(
    grid: RankGrid, index: int, node: int, y: int, width: int, height: int, marked: set[int]
) -> str:
    start = index * node
    cells = [
        f'<text class="dim" x="0" y="{y + height / 2 + 4:.0f}">node {index}</text>'
        f'<rect class="node" x="{LABEL - PAD}" y="{y}" width="{width - LABEL + PAD}" '
        f'height="{height}" rx="8"/>'
    ]
    for rank in range(start, min(start + node, grid.world_size)):
        row, column = divmod(rank - start, COLUMNS)
        x = LABEL + column * (CELL_WIDTH + GAP)
        top = y + PAD + row * (CELL_HEIGHT + GAP)
        cells.append(_cell(grid, rank, x, top, rank in marked))
    return "".join(cells)


def _cell(grid: RankGrid, rank: int, x: int, y: int, marked: bool) -> str:
    places = grid.coordinates(rank)
    fill = FILLS[(places["pp"] * grid.sizes["dp"] + places["dp"]) % len(FILLS)]
    stroke = 'stroke="#14181c" stroke-width="2.5"' if marked else 'stroke="none"'
    coordinates = [f"{axis} {places[axis]}" for axis in AXES if grid.sizes[axis] > 1]
    half = (len(coordinates) + 1) // 2 if len(coordinates) > 2 else len(coordinates)
    texts = [" · ".join(coordinates[:half]), " · ".join(coordinates[half:])]
    drawn = "".join(
        f'<text class="in" x="{x + 7}" y="{y + 30 + 13 * i}">{escape(text)}</text>'
        for i, text in enumerate(texts)
        if text
    )
    return (
        f'<g><rect x="{x}" y="{y}" width="{CELL_WIDTH}" height="{CELL_HEIGHT}" rx="5" '
        f'fill="{fill}" {stroke}/><text class="in" x="{x + 7}" y="{y + 16}" '
        f'style="font-weight:700">{rank}</text>{drawn}</g>'
    )
