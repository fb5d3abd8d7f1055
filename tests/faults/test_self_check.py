"""The check at start: ranks that differ, attention that does not reach, impossible speed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("jsonargparse")
import torch
import torch.distributed as dist

from tests.examples.small_run import SMALL, layout
from tests.support.pool import run_ranks
from ulysses_mc import ParallelConfigError

pytestmark = pytest.mark.megatron


def start(argv: list[str]) -> Any:
    from examples.pretraining import config, preflight, run

    options = config.parse(argv).config
    shape = preflight.check(options, dist.get_world_size())
    return run.prepare(options, shape, torch.device("cpu"))


def refusals(argv: list[str]) -> list[str]:
    """What rank 1 says when it has other settings, other code, other data than rank 0."""
    from examples.pretraining import run, self_check

    said = []

    def refused(argv: list[str]) -> None:
        with pytest.raises(ParallelConfigError) as caught:
            start(argv)
        said.append(str(caught.value))

    other, code, order = dist.get_rank() == 1, self_check.code_digest, self_check.data_order
    with run.on_device(torch.device("cpu")), run.quiet():
        refused([*argv, f"--optimizer.lr={1e-3 + other}"])
        self_check.code_digest = lambda: code() + other * "x"
        refused(argv)
        self_check.code_digest = code
        self_check.data_order = lambda data, first: order(data, first + other)
        refused(argv)
        self_check.data_order = order
    return said


def test_ranks_that_differ_do_not_start(small_data: Path, tmp_path: Path) -> None:
    argv = [*SMALL, f"--data.path=[{small_data}/text]", f"--output={tmp_path}", *layout(ulysses=2)]
    zero, one = run_ranks(2, refusals, argv, timeout=60)
    assert zero == one
    for text, field in zip(zero, ("optimizer.lr", "code", "data order"), strict=True):
        assert f"\n  {field}: " in text and " on rank 0, " in text and " on rank 1" in text


def probe(argv: list[str]) -> tuple[float, str, str]:
    """Seconds of the self-check; what it says of a deaf attention; what the log says of a peak."""
    from examples.pretraining import run, self_check

    with run.on_device(torch.device("cpu")), run.quiet():
        trainer = start([*argv, "--training.self_check=false"])
        clock = time.process_time()
        self_check.ranks_agree(trainer.config, trainer.train_data, 0)
        self_check.attention_reaches_all_ranks(trainer)
        seconds = time.process_time() - clock
        with pytest.raises(RuntimeError) as fast:
            trainer.train()
        for layer in trainer.model[0].module.decoder.layers:  # every token sees itself only
            layer.self_attention.core_attention.forward = lambda q, k, v, *_, **__: q.flatten(2)
        with pytest.raises(RuntimeError) as deaf:
            self_check.attention_reaches_all_ranks(trainer)
    return seconds, str(deaf.value), str(fast.value)


@pytest.mark.parametrize("window", [[], ["--model.transformer={window_size: [2, 0]}"]])
def test_the_probe_sees_a_deaf_attention_and_an_impossible_speed(
    small_data: Path, tmp_path: Path, window: list[str]
) -> None:
    argv = [*SMALL, f"--data.path=[{small_data}/text]", f"--output={tmp_path}", *layout(ulysses=4)]
    argv += ["--logging.peak_tflops_per_gpu=1e-12", *window]
    for seconds, deaf, fast in run_ranks(4, probe, argv, timeout=60):
        print(f"self-check: {seconds:.2f} s of CPU")
        assert seconds < 2
        assert "other tokens on another of 4 ranks leave the loss on the last one" in deaf
        assert "TFLOP/s per GPU is above the hardware's" in fast


def timeouts(argv: list[str]) -> dict[str, float]:
    """Minutes that a collective of each group may take, the pool's default group left out."""
    from examples.pretraining import run

    with run.on_device(torch.device("cpu")), run.quiet():
        start(argv)
    groups = [g for g in dist.distributed_c10d._world.pg_map if g is not dist.group.WORLD]
    backends = {g.group_name: g._get_backend(torch.device("cpu")) for g in groups}
    return {n: b.options._timeout.total_seconds() / 60 for n, b in backends.items()}


def test_the_timeout_holds_for_every_group(small_data: Path, tmp_path: Path) -> None:
    """Megatron's own groups included."""
    sizes = layout(tensor_model=2, pipeline_model=2)
    argv = [*SMALL, *sizes, f"--data.path=[{small_data}/text]", f"--output={tmp_path}"]
    argv.append("--parallel.distributed_timeout_minutes=7")
    for minutes in run_ranks(4, timeouts, argv, timeout=60):
        assert len(minutes) > 5 and set(minutes.values()) == {7.0}, minutes
