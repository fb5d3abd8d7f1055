"""All that can be known of a run before it is launched, and all that is wrong with it at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..parallel_state import RankGrid
from .estimate import Estimate
from .hardware import GIB, GPU
from .job import head_layout
from .memory import stage_layers
from .numbers import short
from .problems import check
from .rules import token_multiple
from .run import Run
from .run_problems import all_problems, parallel_config
from .shapes import TensorShape, layer_shapes
from .traffic import bytes_per_step

LEGEND = (
    "  s tokens of a sample, b micro-batch, h hidden, f MLP, V vocabulary; n_q query and n_k KV\n"
    "  heads of d, on this rank by heads n_q,r and n_k,r; T tensor, P ulysses, R ring"
)


@dataclass(frozen=True)
class Explanation:
    """A run that is right: everything `explain` says about it."""

    run: Run
    grid: RankGrid
    estimate: Estimate
    rank: int
    shapes: list[TensorShape]
    gpu: GPU | None = None


def explain(run: Run, gpu: GPU | None = None, rank: int = 0) -> Explanation:
    """The explanation of a run.

    Args:
        gpu: checks that the memory fits it; None: H100 is taken for times, without that check.
        rank: whose coordinates, groups and shapes to show.

    Raises:
        RequestError: everything that is wrong with it.
    """
    check(all_problems(run, gpu, rank))
    grid = RankGrid(parallel_config(run), run.ranks)
    estimate = Estimate.of(run.job(gpu), run.setting())
    place = grid.coordinates(rank)
    shapes = layer_shapes(run, place["ulysses"], last_stage=place["pp"] == run.pp - 1)
    return Explanation(run, grid, estimate, rank, shapes, gpu)


# -- for people -----------------------------------------------------------------------------------


def as_text(explanation: Explanation) -> str:
    """The explanation as plain text."""
    run, grid, rank = explanation.run, explanation.grid, explanation.rank
    axes = "ulysses" if grid.size("ulysses") > 1 else "tp"
    node = min(explanation.estimate.job.gpu.gpus_per_node, grid.world_size)
    blocks = [
        _title(run),
        grid.describe(rank),
        grid.picture(axes, ranks_per_node=node),
        _batch(run),
        _heads(run),
        _shapes(explanation),
        _memory(explanation.estimate, explanation.gpu),
        _bytes(explanation.estimate),
    ]
    if explanation.gpu:
        blocks.append(_time(explanation.estimate))
    notes = [*explanation.estimate.notes, *run.notes]
    if run.unread:
        notes = [*notes, "not used here: " + " ".join(run.unread)]
    if notes:
        blocks.append("notes\n" + "\n".join(f"  {note}" for note in notes))
    return "\n\n".join(blocks)


def _title(run: Run) -> str:
    model = run.model
    return (
        f"{run.source}: {model.num_layers} layers of {model.hidden_size}, "
        f"{model.num_attention_heads} query and {model.num_query_groups} KV heads of "
        f"{model.head_dim}, {model.total_parameters / 1e6:,.1f}M parameters, {run.precision}"
    )


def _batch(run: Run) -> str:
    dp, steps = run.data_parallel_size, run.global_batch_size // run.micro_batch_size
    steps //= run.data_parallel_size
    shards = run.ulysses * run.ring
    split = stage_layers(run.model, run.setting())
    assert split is not None
    layers = (
        f"{split[1]}" if split[0] == split[1] else f"{split[0]} at the ends, {split[1]} between"
    )
    multiple = token_multiple(run.job(), run.setting())
    return "\n".join(
        [
            "batch",
            f"  global batch {run.global_batch_size} = micro-batch {run.micro_batch_size} x data "
            f"{dp} x {steps} accumulation steps; {run.global_batch_size * run.seq_length:,} tokens",
            f"  sequence {run.seq_length:,} = {shards} x {run.seq_length // shards:,} tokens "
            f"(a multiple of {multiple})",
            f"  {run.model.num_layers} layers over {run.pp} stages: {layers}"
            + (f", in {run.vpp} chunks" if run.vpp > 1 else ""),
        ]
    )


def _heads(run: Run) -> str:
    layout = head_layout(run.model, run.tp, run.ulysses)
    assert not isinstance(layout, Exception)
    rows = [["ulysses rank", "query heads", "KV heads"]]
    for index, (query, kv) in enumerate(zip(layout.query_heads, layout.kv_heads, strict=True)):
        rows.append([str(index), _numbers(query), _numbers(kv)])
    title = f"heads of tp rank 0\n  {layout.describe()}"
    return title + ("\n" + _aligned(rows) if run.ulysses > 1 else "")


def _numbers(heads: range) -> str:
    if len(heads) < 2:
        return str(heads.start) if heads else "none"
    return f"{heads.start}-{heads.stop - 1}"


def _shapes(explanation: Explanation) -> str:
    size = explanation.estimate.job.element_size
    rows = [["tensor", "shape", "letters", "MiB", "before it"]]
    for tensor in explanation.shapes:
        shape = "[" + ", ".join(map(str, tensor.shape)) + "]"
        mebibytes = short(tensor.elements * size / 2**20)
        rows.append([tensor.step, shape, f"[{tensor.meaning}]", mebibytes, tensor.collective])
    return f"one layer on rank {explanation.rank}\n{_aligned(rows)}\n\n{LEGEND}"


def _memory(estimate: Estimate, gpu: GPU | None) -> str:
    rows = [["memory of the fullest rank", "GiB"]]
    rows += [[name.replace("_", " "), f"{size / GIB:.3f}"] for name, size in
             estimate.memory.parts().items()]  # fmt: skip
    rows.append(["total", f"{estimate.memory.total / GIB:.3f}"])
    fits = f"\n  fits {gpu.name}: {gpu.memory / GIB:.1f} GiB" if gpu else ""
    return _aligned(rows) + fits


def _time(estimate: Estimate) -> str:
    parts = {name: s for name, s in estimate.time.parts().items() if s > 0}
    rows = [[f"step time on {estimate.job.gpu.name}", "s"]]
    rows += [[name, short(seconds)] for name, seconds in parts.items()]
    rows.append(["total", short(estimate.seconds)])
    return (
        f"{_aligned(rows)}\n  {estimate.tokens_per_second_per_gpu:,.0f} tokens/s/GPU, "
        f"MFU {estimate.mfu:.1%}"
    )


def _bytes(estimate: Estimate) -> str:
    gpu = estimate.job.gpu
    rows = [["sent per rank and step, MB", gpu.intra.name, gpu.inter.name]]
    for kind, sides in bytes_per_step(estimate.job, estimate.setting).items():
        rows.append([kind, short(sides["intra"] / 1e6), short(sides["inter"] / 1e6)])
    return _aligned(rows)


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  " + "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "  " + "  ".join("-" * w for w in widths), *lines[1:]])


def as_dict(explanation: Explanation) -> dict[str, Any]:
    """The explanation for JSON."""
    run, grid, rank = explanation.run, explanation.grid, explanation.rank
    kinds = ("tp", "ulysses", "ring", "cp", "dp", "pp", "ep")
    return {
        "source": run.source,
        "world_size": grid.world_size,
        "rank": rank,
        "coordinates": grid.coordinates(rank),
        "groups": {kind: list(grid.group_of(rank, kind)) for kind in kinds},
        "shapes": [
            {"tensor": t.step, "shape": list(t.shape), "letters": t.meaning,
             "collective": t.collective}
            for t in explanation.shapes
        ],
        "assumed": list(run.notes),
        "accumulation_steps": explanation.estimate.micro_batches,
        **explanation.estimate.as_dict(),
    }  # fmt: skip
