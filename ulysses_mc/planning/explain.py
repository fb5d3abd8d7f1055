"""All that can be known of a run before it is launched, and all that is wrong with it at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..parallel_state import ParallelConfig, ParallelConfigError, RankGrid
from .estimate import Estimate
from .hardware import GIB, GPU
from .job import Job, head_layout
from .memory import stage_layers
from .numbers import short
from .problems import Problem, RequestError, check
from .rules import broken_rules, nearest_settings, token_multiple
from .run import Run
from .shapes import TensorShape, layer_shapes
from .traffic import bytes_per_step


@dataclass(frozen=True)
class Explanation:
    """A run that is right: everything `explain` says about it."""

    run: Run
    grid: RankGrid
    estimate: Estimate
    rank: int
    shapes: list[TensorShape]


def parallel_config(run: Run) -> ParallelConfig:
    """The run's sizes.

    Raises:
        ParallelConfigError: every problem of the sizes and the order.
    """
    return ParallelConfig(
        tensor_model_parallel_size=run.tp,
        pipeline_model_parallel_size=run.pp,
        ulysses_parallel_size=run.ulysses,
        ring_parallel_size=run.ring,
        expert_model_parallel_size=run.ep,
        expert_tensor_parallel_size=run.etp,
        data_parallel_size=run.dp,
        virtual_pipeline_model_parallel_size=run.vpp if run.vpp > 1 else None,
        order=run.order,
    )


def all_problems(run: Run, gpu: GPU | None = None, rank: int = 0) -> list[Problem]:
    """Everything that is wrong: values, sizes against each other, heads, layers, batch, memory."""
    problems = [*run.problems, *run.size_problems()]
    try:
        config = parallel_config(run)
    except ParallelConfigError as error:
        problems.append(_from_error(error))
        return problems
    try:
        RankGrid(config, run.ranks)
    except ParallelConfigError as error:
        problems.append(_from_error(error))
    if not 0 <= rank < run.ranks:
        text, rule = f"rank {rank} of {run.ranks} ranks", f"ranks run from 0 to {run.ranks - 1}"
        problems.append(Problem(text, rule, "--rank 0"))
    try:
        job = run.job(gpu)
    except RequestError as error:
        return [*problems, *error.problems]
    unsure = "seq" in " ".join(p.found for p in run.problems)  # said already, and not known
    for reason in broken_rules(job, run.setting()):
        if not (reason.kind == "sequence" and unsure):
            nearest = nearest_settings(job, run.setting(), reason.kind)
            problems.append(Problem(reason.line, _RULE[reason.kind], nearest))
    problems += _uneven_stages(run)
    if not problems and gpu is not None:
        problems += _memory_problem(job, run)
    return problems


_RULE = {
    "heads": "tp divides the query heads, and ulysses is at most the heads of a TP rank",
    "tp": "tp divides the hidden sizes",
    "layers": "the stages (and their chunks) hold equally many layers",
    "batch": "the global batch is a whole number of micro-batches on each data-parallel rank",
    "sequence": "Megatron's token order cuts the sequence into 2 chunks for each cp rank",
    "experts": "ep divides the experts and the ranks of a stage",
}


def _uneven_stages(run: Run) -> list[Problem]:
    layers, stages = run.model.num_layers, run.pp * run.vpp
    if layers % stages == 0 or run.ends_count or stage_layers(run.model, run.setting()) is None:
        return []
    return [
        Problem(
            f"{layers} layers / {stages} stages and chunks = {layers / stages:.3g}: not whole",
            _RULE["layers"],
            "the embedding and the loss counted as a layer each "
            "(account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split)",
        )
    ]


def _from_error(error: ParallelConfigError) -> Problem:
    found = " ".join(" ".join([error.request, error.arithmetic]).split())
    return Problem(found, " ".join(error.rule.split()).rstrip("."), error.nearest)


def _memory_problem(job: Job, run: Run) -> list[Problem]:
    used = Estimate.of(job, run.setting()).memory
    if used.total <= job.gpu.memory:
        return []
    name, size = max(used.parts().items(), key=lambda part: part[1])
    return [
        Problem(
            f"needs {used.total / GIB:.1f} GiB per GPU ({name} {size / GIB:.1f})",
            f"{job.gpu.name} has {job.gpu.memory / GIB:.1f} GiB",
            "ulysses-mc plan finds settings that fit",
        )
    ]


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
    return Explanation(run, grid, estimate, rank, shapes)


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
        _memory(explanation.estimate),
        _bytes(explanation.estimate),
    ]
    notes = explanation.estimate.notes
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
    return f"one layer on rank {explanation.rank}\n" + _aligned(rows)


def _memory(estimate: Estimate) -> str:
    rows = [["memory of the fullest rank", "GiB"]]
    rows += [[name.replace("_", " "), f"{size / GIB:.3f}"] for name, size in
             estimate.memory.parts().items()]  # fmt: skip
    rows.append(["total", f"{estimate.memory.total / GIB:.3f}"])
    return _aligned(rows)


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
        "accumulation_steps": explanation.estimate.micro_batches,
        **explanation.estimate.as_dict(),
    }  # fmt: skip
