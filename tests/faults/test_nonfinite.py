"""A NaN stops the run with the step, the rank and the tensor."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("jsonargparse")
import torch
import torch.distributed as dist

from tests.examples.small_run import SMALL, layout
from tests.support.pool import run_ranks

pytestmark = pytest.mark.megatron


def poisoned(argv: list[str]) -> list[str]:
    """Of pp2 x ulysses2: what the run says of a NaN in an output, a parameter, a gradient."""
    from examples.pretraining import config, preflight, run

    options = config.parse(argv).config
    rank, device = dist.get_rank(), torch.device("cpu")

    def stop() -> str:
        with pytest.raises(FloatingPointError) as caught:
            trainer.train_step()
        return str(caught.value)

    with run.on_device(device), run.quiet():
        trainer = run.prepare(options, preflight.check(options, 4), device)
        trainer.train_step()
        layers = trainer.model[0].module.decoder.layers
        said = []

        spoil = layers[1].self_attention.linear_proj.register_forward_hook(
            lambda module, inputs, output: (output[0] * float("nan"), output[1])
        )
        if rank != 1:
            spoil.remove()
        said.append(stop())
        spoil.remove()

        weight = layers[0].mlp.linear_fc1.weight.data
        before = weight[3, 5].clone()
        if rank == 2:
            weight[3, 5] = float("inf")
        said.append(stop())
        with pytest.raises(FloatingPointError) as caught:
            trainer.save()
        said.append(str(caught.value))
        weight[3, 5] = before

        trainer.train_step()
        if rank == 3:
            layers[1].mlp.linear_fc2.weight.register_hook(lambda gradient: gradient / 0)
        said.append(stop())
    return said


def test_a_nan_is_named(small_data: Path, tmp_path: Path) -> None:
    argv = [*SMALL, f"--data.path=[{small_data}/text]", f"--output={tmp_path}",
            *layout(pipeline_model=2, ulysses=2)]  # fmt: skip
    results = run_ranks(4, poisoned, argv, timeout=60)
    assert all(said == results[0] for said in results)
    output, parameter, saved, gradient = results[0]
    assert output.startswith("the loss is nan at iteration 2 (samples 8 to 15); first in rank 1: ")
    assert "the output of decoder.layers.1.self_attention.linear_proj; later also on" in output
    assert parameter.endswith(
        "first in rank 2: parameter decoder.layers.2.mlp.linear_fc1.weight (1 of 8192 elements)"
    )
    assert saved == (
        "not finite after the update of iteration 1: rank 2: parameter "
        "decoder.layers.2.mlp.linear_fc1.weight (1 of 8192 elements); not saved, the checkpoints "
        "before it are untouched"
    )
    assert not (tmp_path / "checkpoints").exists()
    assert gradient.startswith("the gradient norm is nan at iteration 3 (samples 16 to 23); ")
    assert "rank 3: gradient of decoder.layers.3.mlp.linear_fc2.weight (" in gradient
