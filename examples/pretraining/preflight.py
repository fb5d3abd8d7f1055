"""Everything about a config that can be known to be wrong before a process group exists.

Pure arithmetic and a look at the data files: no torch, no Megatron, under a second.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import Any

from ulysses_mc.parallel_state import ParallelConfigError, RankGrid
from ulysses_mc.planning.example_keys import value_problems

from .config import Config
from .errors import UserError
from .indexed import open_checked
from .model_rules import RULES, experts_without_padding
from .problems import Problems


@dataclass(frozen=True)
class DataDescription:
    """What the data files say about their tokens; Megatron's dataset takes it as its tokenizer."""

    vocab_size: int
    eod: int
    pad: int
    source: str

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        """Part of the hash that names Megatron's cached sample indices."""
        return {"class": "DataDescription", "vocab_size": self.vocab_size, "eod": self.eod}


@dataclass(frozen=True)
class RunShape:
    """The arithmetic of a run: who shares what, how many samples and tokens make a step."""

    grid: RankGrid
    micro_batch_size: int
    accumulation_steps: int
    seq_length: int
    """tokens of a sample in the data"""
    padded_seq_length: int
    """tokens of a sample in the model: a multiple of what the token order needs"""
    token_multiple: int
    """what the padded length is a multiple of"""
    vocab_size: int
    padded_vocab_size: int

    @property
    def data_parallel_size(self) -> int:
        return self.grid.size("dp")

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.data_parallel_size * self.accumulation_steps

    @property
    def tokens_per_step(self) -> int:
        """Tokens of the data, padding not counted."""
        return self.global_batch_size * self.seq_length

    def describe(self) -> str:
        """The batch arithmetic, for people."""
        sizes = self.grid.sizes
        shards = sizes["cp"]
        lines = [
            f"world size {self.grid.world_size} = tensor {sizes['tp']} x pipeline {sizes['pp']} x "
            f"ulysses {sizes['ulysses']} x ring {sizes['ring']} x data {sizes['dp']}",
            f"global batch {self.global_batch_size} samples = micro batch "
            f"{self.micro_batch_size} x data {sizes['dp']} x {self.accumulation_steps} "
            f"accumulation steps; {self.tokens_per_step} tokens per step",
            f"sequence {self.padded_seq_length} tokens over {shards} ulysses x ring ranks: "
            f"{self.padded_seq_length // shards} tokens on each",
        ]
        if self.padded_seq_length != self.seq_length:
            extra = self.padded_seq_length - self.seq_length
            lines.append(
                f"samples of {self.seq_length} tokens are padded by {extra} tokens that the loss "
                f"leaves out: Megatron's token order needs a multiple of {self.token_multiple}"
            )
        return "\n".join(lines)


def token_multiple(config: Config, grid: RankGrid) -> int:
    """What the sequence length is a multiple of inside Megatron.

    Its token order cuts the sequence into 2P chunks (P = ulysses x ring > 1); its option
    sequence_parallel cuts each rank's tokens once more, over the tensor-parallel ranks.
    """
    cut_by_tensor = bool(config.model.transformer.get("sequence_parallel"))
    ranks, tensor = grid.size("cp"), grid.size("tp") if cut_by_tensor else 1
    return ranks * lcm(2, tensor) if ranks > 1 else tensor


def check(config: Config, world_size: int) -> RunShape:
    """Checks `config` for that many ranks.

    Raises:
        ParallelConfigError, UserError: what is wrong, with the numbers and what would work; if
            several things are, a UserError that lists them all.
    """
    problems = Problems()
    grid = problems.of(RankGrid, config.parallel, world_size)
    values = value_problems(dataclasses.asdict(config))
    steps: int | None = None
    for problem in values:
        problems.add(UserError(str(problem)))
    if not any(problem.rule.startswith("a whole number") for problem in values):
        for rule in RULES:
            problems.of(rule, config)
        if grid is not None:
            steps = problems.of(_accumulation_steps, config, grid)
    problems.of(_output, config)
    prefixes = problems.of(data_prefixes, config) or []
    vocab = None
    if all(Path(f"{prefix}.idx").is_file() for prefix in prefixes[:1]):  # else one wrong name
        vocab = problems.of(_vocabulary, config)
    for prefix in prefixes:
        problems.of(open_checked, prefix, vocab)
    multiple = 1 if grid is None else token_multiple(config, grid)
    padded = -(-config.model.seq_length // multiple) * multiple
    problems.of(experts_without_padding, config, padded, multiple)
    problems.tell()
    assert grid is not None and steps is not None and vocab is not None
    # Not times tp, as in Megatron-LM: a checkpoint then fits every tp that divides it.
    step = lcm(config.model.make_vocab_size_divisible_by, grid.size("tp"))
    return RunShape(
        grid=grid,
        micro_batch_size=config.batch.micro_batch_size,
        accumulation_steps=steps,
        seq_length=config.model.seq_length,
        padded_seq_length=padded,
        token_multiple=multiple,
        vocab_size=vocab,
        padded_vocab_size=-(-vocab // step) * step,
    )


def _output(config: Config) -> None:
    output = Path(config.output)
    cache = Path(config.data.cache or output / "data_cache")
    for path in (output, output / "checkpoints", output / "tensorboard", cache):
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} is a file, where the run needs a folder")
    if (log := output / "log.jsonl").is_dir():
        raise UserError(f"{log} is a folder, where the run needs a file")


def _vocabulary(config: Config) -> int:
    description = describe_data(config)
    vocab = config.model.vocab_size or description.vocab_size
    if vocab < description.vocab_size:
        raise UserError(
            f"model.vocab_size {vocab} is smaller than the data's vocabulary, "
            f"{description.vocab_size} ({description.source})"
        )
    return vocab


def _accumulation_steps(config: Config, grid: RankGrid) -> int:
    """Those of a training step; evaluation's own batch must fit as well."""
    batch, own = config.batch, config.evaluation
    micro, total = batch.micro_batch_size, batch.global_batch_size
    steps = accumulation_steps(grid, micro, total, "batch")
    if own.interval and (own.micro_batch_size or own.global_batch_size):
        evaluated = own.micro_batch_size or micro, own.global_batch_size or total
        accumulation_steps(grid, *evaluated, "evaluation")
    return steps


def ranks_per_node(config: Config, gpus: int) -> int:
    """One rank per GPU; without GPUs as many as one replica of the model takes."""
    if config.device != "cpu" and gpus:
        return gpus
    return config.parallel.model_size * (config.parallel.data_parallel_size or 1)


def accumulation_steps(grid: RankGrid, micro: int, total: int, group: str) -> int:
    """Micro-batches of one rank in one step: total / (micro x data-parallel size), a whole number.

    An interleaved pipeline also needs a multiple of its stages.
    """
    data, stages = grid.size("dp"), grid.size("pp")
    chunks = grid.config.virtual_pipeline_model_parallel_size
    unit = micro * data * (stages if chunks and chunks > 1 else 1)
    if micro < 1 or total < 1 or total % unit:
        product = f"micro_batch_size {micro} x data-parallel size {data}"
        rule = f"{group}.global_batch_size is a multiple of {product}"
        if unit != micro * data:
            rule += f" x {stages} stages of the interleaved pipeline"
        below, above = total // max(unit, 1) * unit, (total // max(unit, 1) + 1) * unit
        raise ParallelConfigError(
            f"{group}.global_batch_size {total} with {product}.",
            f"{total} / {unit} is not a whole number of accumulation steps.",
            f"{rule}.",
            f"global_batch_size {f'{below} or ' if below > 0 else ''}{above}",
        )
    return total // (micro * data)


def data_prefixes(config: Config) -> list[str]:
    """The .bin/.idx prefixes of data.path, weights left out."""
    return blend(config)[0]


def blend(config: Config) -> tuple[list[str], list[float] | None]:
    """data.path as (prefixes, weights or None)."""
    path = config.data.path
    if not path:
        raise UserError("data.path names no data; examples/prepare_data.py makes some")
    weighted = [isinstance(word, int | float) for word in path]
    if not any(weighted):
        return [str(word) for word in path], None
    if weighted != [True, False] * (len(path) // 2):
        raise UserError(f"data.path {path}: prefixes alone, or weight and prefix in turn")
    return [str(word) for word in path[1::2]], [float(word) for word in path[::2]]


def describe_data(config: Config) -> DataDescription:
    """Reads the vocabulary and special tokens of the data (data.description)."""
    prefix = data_prefixes(config)[0]
    path = Path(config.data.description or Path(prefix).parent / "data.json")
    try:
        facts = json.loads(path.read_text())
        vocab, end, padding = (int(facts[k]) for k in ("vocab_size", "end_of_document", "padding"))
        if not 0 <= end < vocab or not -1 <= padding < vocab:  # -1: none
            raise ValueError(f"end_of_document {end}, padding {padding}: vocab_size is {vocab}")
    except FileNotFoundError:
        raise UserError(
            f"{path} is missing: it says vocab_size, end_of_document and padding of the data "
            f"{prefix}; make it, name it with data.description, or run examples/prepare_data.py"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise UserError(f"{path} is not a description of data: {error!r}") from None
    return DataDescription(vocab, end, padding, source=str(path))
