"""Row 1: a per-token tensor (weights, temperatures, teacher log-probs) cut unlike the tokens."""

from __future__ import annotations

import pytest
import torch

from ulysses_mc import ParallelConfigError, SequenceLayout, shard_batch

LAYOUTS = [
    SequenceLayout.contiguous(5, 2),
    SequenceLayout.contiguous(16, 4),
    SequenceLayout.zigzag(16, 4),
    SequenceLayout.from_lengths([0, 3, 1]),
    SequenceLayout.zigzag_packed([0, 8, 24], 2),
]


def global_batch(s: int) -> dict[str, object]:
    ids = torch.arange(2 * s).view(2, s)
    return {
        "tokens": ids,
        "labels": ids + 1000,
        "weights": ids / 7,
        "temperatures": ids.double().sqrt(),
        "teacher_log_probs": ids[..., None] * torch.ones(3),
        "loss_mask": ids % 3 == 0,
        "mtp_embeddings": (ids[..., None] * torch.ones(4)).transpose(0, 1),  # [s, b, d]
        "attention_mask": torch.ones(2, 1, s, s).tril().bool(),
        "cu_seqlens": torch.tensor([0, 2, s]),
        "max_seqlen": torch.tensor(s - 2),
        "sample_ids": torch.tensor([70, 71]),
        "nothing": None,
        "name": "train",
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_per_token_tensor_follows_the_tokens(layout: SequenceLayout) -> None:
    s = layout.sequence_length
    batch = global_batch(s)
    for rank in range(layout.group_size):
        local = shard_batch(batch, layout, rank, dims={"mtp_embeddings": 0}, whole=("sample_ids",))
        ids = local["tokens"]
        assert torch.equal(ids[0], torch.tensor(layout.token_indices(rank)).long())
        assert torch.equal(ids[1], ids[0] + s)
        assert torch.equal(local["labels"], ids + 1000)
        assert torch.equal(local["weights"], ids / 7)
        assert torch.equal(local["temperatures"], ids.double().sqrt())
        assert torch.equal(local["teacher_log_probs"], ids[..., None] * torch.ones(3))
        assert torch.equal(local["loss_mask"], ids % 3 == 0)
        assert torch.equal(
            local["mtp_embeddings"], (ids[..., None] * torch.ones(4)).mT.mT.transpose(0, 1)
        )
        for name in ("attention_mask", "cu_seqlens", "max_seqlen", "sample_ids", "nothing", "name"):
            assert local[name] is batch[name]
        assert ids.view(-1).numel() == 2 * layout.lengths[rank]  # contiguous
    assert "position_ids" not in batch  # the caller's dict stays as it was


def test_packed_tokens_are_cut_along_dim_0() -> None:
    layout = SequenceLayout.contiguous(13, 4)
    ids = torch.arange(13)
    shards = [
        shard_batch({"input_ids": ids, "x": ids[:, None]}, layout, r, dim=0) for r in range(4)
    ]
    assert torch.equal(layout.unshard([s["input_ids"] for s in shards], 0), ids)
    assert torch.equal(layout.unshard([s["position_ids"] for s in shards], 0), ids)
    assert [len(s["x"]) for s in shards] == [4, 3, 3, 3]


@pytest.mark.parametrize(("shape", "dim"), [((8,), -1), ((8, 3), -2), ((3, 8), -1)])
def test_a_negative_dim_counts_from_the_end_of_each_tensor(shape, dim) -> None:
    layout = SequenceLayout.contiguous(8, 2)
    ids = torch.arange(torch.Size(shape).numel()).view(shape)
    batch = {"tokens": ids, "labels": ids + 1}
    for rank in range(2):
        counted = shard_batch(batch, layout, rank, dim=dim)
        same = shard_batch(batch, layout, rank, dim=len(shape) + dim)
        assert counted.keys() == same.keys() == {"tokens", "labels", "position_ids"}
        assert all(torch.equal(counted[name], same[name]) for name in same)
        assert counted["position_ids"].shape == ((3, 4) if shape == (3, 8) else (4,))


def test_a_negative_dim_of_a_single_tensor() -> None:
    layout = SequenceLayout.contiguous(8, 2)
    batch = {"tokens": torch.arange(16).view(2, 8), "scores": torch.zeros(2, 5, 8)}
    part = shard_batch(batch, layout, 1, dims={"scores": -1, "tokens": -1})
    assert part["scores"].shape == (2, 5, 4)
    assert part["position_ids"].tolist() == [[4, 5, 6, 7]] * 2  # -1 is dim 1 of the tokens
    with pytest.raises(ParallelConfigError, match="has no such dim"):
        shard_batch(batch, layout, 1, dim=-3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"whole": ("sample_id",)}, r"whole names 'sample_id'[\s\S]*work: 'sample_ids'"),
        ({"whole": "sample_id"}, r"whole names 'sample_id'[\s\S]*work: 'sample_ids'"),
        ({"dims": {"token": 0}}, r"dims names 'token'[\s\S]*work: 'tokens'"),
        ({"dims": {"zzz": 0}}, r"It has 'tokens', 'sample_ids'\.[\s\S]*no 'zzz' in dims"),
    ],
)
def test_options_for_entries_that_are_not_there_are_refused(options, says) -> None:
    batch = {"tokens": torch.zeros(2, 8), "sample_ids": torch.zeros(2)}
    with pytest.raises(ParallelConfigError, match=says):
        shard_batch(batch, SequenceLayout.contiguous(8, 2), 0, **options)


def test_a_tensor_of_another_length_is_named_with_all_numbers() -> None:
    layout = SequenceLayout.contiguous(5, 2)
    batch = {"tokens": torch.zeros(2, 5), "weights": torch.zeros(2, 4)}
    with pytest.raises(ParallelConfigError) as caught:
        shard_batch(batch, layout, 1)
    for part in ("'weights'", "[2, 4]", "dim 1", "rank 1 of 2", "4 tokens", "has 5", "this rank 2"):
        assert part in str(caught.value)


@pytest.mark.parametrize("tensor", [torch.zeros(2), torch.zeros(5)])
def test_a_tensor_without_the_dim_is_named(tensor: torch.Tensor) -> None:
    layout = SequenceLayout.contiguous(5, 2)
    with pytest.raises(ParallelConfigError, match="'seeds'"):
        shard_batch({"tokens": torch.zeros(2, 5), "seeds": tensor}, layout, 0)


def test_what_is_local_already_passes() -> None:
    layout = SequenceLayout.contiguous(5, 2)
    local = torch.zeros(2, 3)
    assert shard_batch({"tokens": torch.zeros(2, 5), "w": local}, layout, 0)["w"] is local
    with pytest.raises(ParallelConfigError, match="'w'"):  # rank 1 holds 2 tokens, not 3
        shard_batch({"tokens": torch.zeros(2, 5), "w": local}, layout, 1)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_group_is_refused(rank: int) -> None:
    with pytest.raises(ParallelConfigError, match="0 to 1"):
        shard_batch({"tokens": torch.zeros(2, 5)}, SequenceLayout.contiguous(5, 2), rank)


def test_a_name_alone_is_one_name_not_its_letters() -> None:
    batch = {"loss": torch.zeros(2, 4), "loss_mask": torch.zeros(7)}
    layout = SequenceLayout.contiguous(4, 2)
    local = shard_batch(batch, layout, 0, whole="loss_mask")
    assert local["loss"].shape == (2, 2) and local["loss_mask"] is batch["loss_mask"]
