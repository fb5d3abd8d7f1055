"""Megatron's DistributedOptimizer over data x Ulysses trains as one process does, with unequal
numbers of valid tokens everywhere; by the pretraining example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("jsonargparse")
import torch

from tests.examples.small_run import SMALL, layout
from tests.examples.test_training import contents, train
from tests.support.pool import run_ranks
from tests.zero.training import LAYOUTS

pytestmark = pytest.mark.megatron

# The end-of-document tokens and the padding (30 tokens to 32) have no weight.
OPTIONS = [
    *SMALL, "--data.eod_mask_loss=true", "--training.train_iters=3", "--evaluation.interval=0",
    "--optimizer.adam_eps=1e-4", "--model.num_layers=2", "--batch.micro_batch_size=1",
]  # fmt: skip
TOLERANCE = 2e-5  # relative; of weights, to each tensor's largest


def run(folder: Path, data: Path, ranks: int, ulysses: int, *more: str) -> Any:
    """(losses, gradient norms, the weights after three steps)."""
    argv = [*OPTIONS, *more, f"--data.path=[{data}/text]", f"--output={folder}"]
    log = run_ranks(ranks, train, [*argv, *layout(ulysses=ulysses)], timeout=90)[0]
    whole = run_ranks(1, contents, folder / "checkpoints/iter_0000003", timeout=90)[0]
    weights = {k: v for k, v in whole.items() if k.startswith("optimizer.state.param.")}
    return [r["lm_loss"] for r in log], [r["grad_norm"] for r in log], weights


@pytest.fixture(scope="module")
def one(small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("one"), small_data, 1, 1)


@pytest.mark.parametrize(("dp", "ulysses"), LAYOUTS)
def test_equals_one_process(
    one: Any, small_data: Path, tmp_path: Path, dp: int, ulysses: int
) -> None:
    losses, norms, weights = run(tmp_path, small_data, dp * ulysses, ulysses)
    assert losses == pytest.approx(one[0], rel=TOLERANCE)
    assert norms == pytest.approx(one[1], rel=TOLERANCE)
    assert weights.keys() == one[2].keys() and len(weights) == 9
    for name, weight in one[2].items():
        assert (weights[name] - weight).abs().max() <= TOLERANCE * weight.abs().max(), name


def test_bf16_weights_with_fp32_reduction(one: Any, small_data: Path, tmp_path: Path) -> None:
    """Master weights in fp32, no further from fp32's than one process in bf16 is."""

    def distance(weights: dict[str, torch.Tensor]) -> float:
        assert all(w.dtype == torch.float32 for w in weights.values())
        return sum(float((weights[n] - w).square().sum()) for n, w in one[2].items()) ** 0.5

    alone = run(tmp_path / "alone", small_data, 1, 1, "--training.precision=bf16")
    for dp, ulysses in LAYOUTS:
        found = run(tmp_path / f"{dp}", small_data, 4, ulysses, "--training.precision=bf16")
        assert distance(found[2]) < 1.3 * distance(alone[2])
        assert found[0] == pytest.approx(one[0], rel=2e-3)
