"""Which rank reads which sample: peers share, data-parallel ranks are disjoint, nothing twice."""

from pathlib import Path
from typing import Any

import pytest
import torch

from examples.pretraining.data import Batches, microbatch_samples, refuse_pickled_arrays
from examples.pretraining.errors import UserError


def samples_of_step(consumed: int, accumulation: int, micro: int, dp: int) -> list[int]:
    """Of all data-parallel ranks."""
    return [
        sample
        for rank in range(dp)
        for batch in microbatch_samples(consumed, accumulation, micro, rank, dp)
        for sample in batch
    ]


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_the_global_batch_does_not_depend_on_the_layout(dp: int) -> None:
    for micro in (1, 2):
        assert sorted(samples_of_step(40, 8 // dp // micro, micro, dp)) == list(range(40, 48))


class Five:
    """A dataset of 5 samples of 3 tokens."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = torch.full((3,), index)
        return {"tokens": tokens, "labels": tokens + 1, "loss_mask": torch.ones(3)}


def test_padding_and_samples_beyond_the_end_have_no_weight() -> None:
    (batch,) = Batches(Five(), padded_seq_length=4, dp_rank=0, dp_size=1, vocab_size=9).step(
        4, 1, 2
    )
    assert batch["tokens"].tolist() == [[4, 4, 4, 0], [4, 4, 4, 0]]
    assert batch["loss_mask"].tolist() == [[1, 1, 1, 0], [0, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3]] * 2


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    batches = Batches(Five(), padded_seq_length=4, dp_rank=0, dp_size=1, vocab_size=3)
    next(batches.step(0, 1, 2))
    with pytest.raises(UserError, match="sample 3 holds token 3, the model's vocabulary has 3"):
        next(batches.step(2, 1, 2))


def test_a_cached_index_with_pickled_objects_is_refused(tmp_path: Path) -> None:
    import numpy as np

    np.save(tmp_path / "good.npy", np.arange(3))
    refuse_pickled_arrays(tmp_path)
    np.save(tmp_path / "bad.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match=r"bad\.npy holds pickled objects"):
        refuse_pickled_arrays(tmp_path)
