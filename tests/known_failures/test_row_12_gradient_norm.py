"""Row 12: the gradient norm counts every element once, sharded and replicated ones together."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.support.pool import run_ranks
from ulysses_mc import (
    ParallelConfigError,
    average_replicated_gradients,
    clip_gradients,
    gradient_norm,
)
from ulysses_mc.parallel_state import ParallelConfig, initialize_model_parallel

RIGHT = math.sqrt(204 + 25)  # of 1..8 and (3, 4): 15.13275
COUNTED_ON_EACH_RANK, SUMMED_OVER_COPIES = math.sqrt(204 + 4 * 25), math.sqrt(2 * (204 + 25))


class Model(nn.Module):
    """y = w . x + v . z, so that the gradients are x and z."""

    def __init__(self) -> None:
        super().__init__()
        self.sharded = nn.Parameter(torch.zeros(8))
        self.replicated = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return self.sharded @ x + self.replicated @ z


def run(dims: tuple[Any, ...], sizes: dict[str, int]) -> tuple[float, float, list[float]]:
    """The norm, the norm after clipping to 1, and this rank's replicated gradient."""
    state = initialize_model_parallel(ParallelConfig(**sizes), use_megatron=False)
    model = Model()
    fully_shard(model, mesh=state.mesh(*dims), ignored_params={model.replicated})
    mine = 4.0 if dist.get_rank() == 1 else 0.0  # all of the gradient comes from one of 4 ranks
    model(mine * torch.arange(1.0, 9.0), mine * torch.tensor([3.0, 4.0])).backward()
    average_replicated_gradients(model.parameters(), state.group("dp", "ulysses"))
    replicated = model.replicated.grad.tolist()
    norm = clip_gradients(model.parameters(), 1.0).item()
    return norm, gradient_norm(model.parameters()).item(), replicated


@pytest.mark.parametrize(
    "dims", [(("dp", "ulysses"),), ("dp", "ulysses"), ("ulysses", "dp")], ids=str
)
def test_dp2_ulysses2(dims: tuple[Any, ...]) -> None:
    for norm, clipped, replicated in run_ranks(4, run, dims, {"ulysses_parallel_size": 2}):
        assert norm == pytest.approx(RIGHT, rel=1e-6)
        assert clipped == pytest.approx(1.0, rel=1e-6)
        assert replicated == [3.0, 4.0]
    assert pytest.approx(17.43560) == COUNTED_ON_EACH_RANK
    assert abs(RIGHT - SUMMED_OVER_COPIES) > 1


def test_nothing_to_measure() -> None:
    assert gradient_norm([nn.Parameter(torch.zeros(2))]).item() == 0.0


def run_partial() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Replicate()]))
    weight.grad = DTensor.from_local(torch.ones(2), mesh, [Replicate()])
    assert gradient_norm([weight]).item() == pytest.approx(math.sqrt(2))
    weight.grad = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(ParallelConfigError, match="reduced before"):
        gradient_norm([weight])


def test_unreduced_gradients_are_refused() -> None:
    run_ranks(2, run_partial)
