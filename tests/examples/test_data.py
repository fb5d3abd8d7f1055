"""Which rank reads which sample: peers share, data-parallel ranks are disjoint, nothing twice."""

from pathlib import Path
from typing import Any

import pytest
import torch

from examples.pretraining.data import (
    Batches,
    in_one_row,
    microbatch_samples,
    refuse_pickled_arrays,
)
from examples.pretraining.errors import SeenByOneRank, UserError


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
    assert batch["position_ids"].tolist() == [[0, 1, 2, 2]] * 2  # a table of 3 positions will do


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    batches = Batches(Five(), padded_seq_length=4, dp_rank=0, dp_size=1, vocab_size=3)
    next(batches.step(0, 1, 2))
    with pytest.raises(SeenByOneRank, match="sample 3 holds token 3, the model's vocabulary has 3"):
        next(batches.step(2, 1, 2))


def test_a_cached_index_with_pickled_objects_is_refused(tmp_path: Path) -> None:
    import numpy as np

    np.save(tmp_path / "good.npy", np.arange(3))
    refuse_pickled_arrays(tmp_path)
    np.save(tmp_path / "bad.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match=r"bad\.npy holds pickled objects"):
        refuse_pickled_arrays(tmp_path)


@pytest.mark.parametrize("bytes_kept", [0, 5, 100, -1])
def test_a_damaged_cached_index_is_refused(bytes_kept: int, tmp_path: Path) -> None:
    import numpy as np

    np.save(tmp_path / "index.npy", np.arange(3))
    whole = (tmp_path / "index.npy").read_bytes()
    (tmp_path / "index.npy").write_bytes(whole[:bytes_kept])
    with pytest.raises(UserError, match=r"index\.npy is damaged .*; remove it"):
        refuse_pickled_arrays(tmp_path)


def test_other_data_of_the_same_name_have_other_cached_indices(tmp_path: Path) -> None:
    from examples.pretraining.config import Config, DataOptions
    from examples.pretraining.data import _data_digest

    config = Config(data=DataOptions(path=[str(tmp_path / "text")]))
    seen = set()
    for content in (b"1", b"12", b"34"):
        for end in ("bin", "idx"):
            (tmp_path / f"text.{end}").write_bytes(content)
        assert _data_digest(config) == _data_digest(config)
        seen.add(_data_digest(config))
    assert len(seen) == 3


@pytest.mark.megatron
def test_documents_are_where_megatron_would_reset_mask_and_positions() -> None:
    """Of two samples, one with its end-of-document tokens at the edges, by Megatron's own rule."""
    pytest.importorskip("megatron.core")
    from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids

    from ulysses_mc import SequenceLayout, shard_batch

    tokens = torch.tensor([[0, 5, 6, 0, 7, 8, 9, 0], [3, 4, 0, 0, 2, 2, 2, 1]])
    batch = {"tokens": tokens, "position_ids": torch.arange(8).expand(2, 8)}
    row = in_one_row(batch, 0)
    assert row["cu_seqlens"].tolist() == [0, 1, 4, 8, 11, 12, 16]
    positions = shard_batch(row, SequenceLayout.contiguous(16, 1), 0)["position_ids"][0]
    documents = torch.bucketize(torch.arange(16), row["cu_seqlens"][1:], right=True)
    for sample in range(2):
        mask, _, expected = _get_ltor_masks_and_position_ids(
            tokens[sample], 0, True, True, False, True
        )
        own = slice(8 * sample, 8 * sample + 8)
        assert torch.equal(positions[own], expected)
        same = documents[own, None] == documents[None, own]
        assert torch.equal(mask[0], ~(same & torch.ones(8, 8, dtype=torch.bool).tril()))


@pytest.mark.megatron
def test_a_part_without_tokens_is_refused(tmp_path: Path) -> None:
    """Megatron would count passes over it without end."""
    import numpy as np

    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    from examples.pretraining.config import Config, DataOptions
    from examples.pretraining.data import build_datasets

    builder = indexed.IndexedDatasetBuilder(str(tmp_path / "text.bin"), dtype=np.int32)
    for tokens in ([], range(20)):
        builder.add_document(torch.tensor(list(tokens), dtype=torch.int32), [len(tokens)])
    builder.finalize(str(tmp_path / "text.idx"))
    (tmp_path / "data.json").write_text('{"vocab_size": 99, "end_of_document": 0, "padding": -1}')
    data = DataOptions(path=[str(tmp_path / "text")], split="1,1,0")
    config = Config(output=str(tmp_path / "out"), data=data)
    with pytest.raises(
        UserError, match=r"1 documents that data.split '1,1,0' takes .* hold no tok"
    ):
        build_datasets(config, 4, 8, None)
