"""Everything that is wrong with a run, at once."""

from __future__ import annotations

from ..parallel_state import ParallelConfig, ParallelConfigError, RankGrid
from .estimate import Estimate
from .hardware import GIB, GPU
from .job import Job
from .memory import stage_layers
from .problems import Problem, RequestError
from .rules import broken_rules, nearest_settings
from .run import Run
from .who_runs import cannot_run


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
    problems += [*_uneven_stages(run), *cannot_run(run), *_positions(run)]
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
    if run.ends_count and (layers + 2) % stages:
        text = f"{layers} layers and the embedding and the loss / {stages} stages and chunks"
        hint = "without account_for_*" if layers % stages == 0 else ""
        return [Problem(f"{text} = {(layers + 2) / stages:.3g}: not whole", _RULE["layers"], hint)]
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


def _positions(run: Run) -> list[Problem]:
    """Megatron-LM wants --max-position-embeddings, and at least the sequence, of every model."""
    if run.positions is None or run.positions >= run.seq_length:
        return []
    given = f"is {run.positions}" if run.positions else "is missing"
    hint = f"--max-position-embeddings {run.seq_length}"
    rule = f"Megatron wants it, and at least --seq-length {run.seq_length}"
    return [Problem(f"--max-position-embeddings {given}", rule, hint)]


def _from_error(error: ParallelConfigError) -> Problem:
    found = " ".join((error.arithmetic or error.request).split()).rstrip(".")
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
