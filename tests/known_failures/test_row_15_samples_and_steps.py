"""Row 15: a wrong number of steps; samples read twice, by peers that ought to share them."""

from __future__ import annotations

from examples.pretraining.data import microbatch_samples
from tests.examples.test_data import samples_of_step
from ulysses_mc.parallel_state import ParallelConfig, RankGrid


def test_each_sample_once_in_full_steps() -> None:
    """1000 samples, 2 ranks, micro batch 1, accumulation 8: 62 steps with dp 2, 125 with dp 1."""
    for dp, steps in ((2, 62), (1, 125)):
        batch = dp * 8
        assert 1000 // batch == steps
        seen = [n for step in range(steps) for n in samples_of_step(step * batch, 8, 1, dp)]
        assert sorted(seen) == list(range(steps * batch))


def test_peers_share_their_samples_and_data_parallel_ranks_do_not() -> None:
    config = ParallelConfig(tensor_model_parallel_size=2, ulysses_parallel_size=2)
    grid = RankGrid(config, 8)
    read = {
        rank: microbatch_samples(40, 3, 2, grid.coordinates(rank)["dp"], grid.size("dp"))
        for rank in range(8)
    }
    for ranks in grid.groups("tp", "ulysses"):
        assert all(read[rank] == read[ranks[0]] for rank in ranks)
    for ranks in grid.groups("dp"):
        seen = [sample for rank in ranks for micro in read[rank] for sample in micro]
        assert sorted(seen) == list(range(40, 52))
