"""Packed documents in a Megatron model: Megatron's own layout and others, against one rank."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.megatron.gathering import Step, set_weights
from tests.megatron.packed_gpt import (
    Arrange,
    contiguous,
    in_megatrons_order,
    sdpa_spec,
    train,
    unpacked,
    whole_batch,
    zigzag,
)
from tests.megatron.small_gpt import MLA, Setting, gpt_chunks
from tests.megatron.test_parity import assert_same
from tests.support import oracle
from tests.support.pool import run_ranks
from ulysses_mc import ParallelConfigError, SequenceLayout, megatron_on_cpu

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(torch.cuda.is_available(), reason="compares CPU ranks"),
]
pytest.importorskip("megatron.core")

GQA = {"num_attention_heads": 8, "num_query_groups": 4}


@functools.cache
def one_rank(mla: bool) -> list[Step]:
    return run_ranks(1, train, Setting(config=MLA if mla else GQA), unpacked, timeout=60)[0]


@pytest.mark.parametrize(
    ("setting", "arrange"),
    [
        (Setting(config=GQA), contiguous),
        (Setting(cp=2, config=GQA), in_megatrons_order),
        (Setting(tp=2, cp=2, config=GQA | {"sequence_parallel": True}), in_megatrons_order),
        (Setting(cp=4, distributed_optimizer=True, config=GQA), contiguous),
        (Setting(cp=2, config=MLA), in_megatrons_order),
    ],
    ids=["one-rank", "megatrons-own", "tpsp", "contiguous-ulysses4", "mla"],
)
def test_equals_one_rank(setting: Setting, arrange: Arrange) -> None:
    for steps in run_ranks(setting.tp * setting.cp, train, setting, arrange, timeout=120):
        assert_same(one_rank("multi_latent_attention" in setting.config), steps)


# -- isolation ------------------------------------------------------------------------------


def losses_and_gradient(arrange: Arrange, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all tokens in order, and of the embedding, for documents 1 to 3; document 0 changed.

    Document 0 is five tokens with ids from `first`, which no other document has.
    """
    from megatron.core import parallel_state

    from ulysses_mc.layers import wire_rope

    with megatron_on_cpu():
        setting = Setting(cp=2, config=GQA)
        setting.initialize()
        (model,) = gpt_chunks(setting, sdpa_spec)
        set_weights([model])
        if arrange is contiguous:
            wire_rope(model)
        batch = whole_batch(0, 0)
        tokens = batch["tokens"] % 40
        tokens[0, :5] = torch.arange(first, first + 5)
        batch["loss_mask"][0, :5] = 0
        batch, arguments = arrange(batch | {"tokens": tokens})
        losses = model(
            batch["tokens"], batch["position_ids"], None, labels=batch["labels"], **arguments
        )
        (losses * batch["loss_mask"]).sum().backward()
        gradient = model.embedding.word_embeddings.weight.grad
        dist.all_reduce(gradient)
        shards = [torch.empty_like(losses[:, : losses.size(1)]) for _ in range(2)]
        masked = (losses * batch["loss_mask"]).detach()
        dist.all_gather(shards, masked, group=parallel_state.get_context_parallel_group())
        return torch.cat(shards, 1), gradient


@pytest.mark.parametrize("arrange", [zigzag, contiguous])
def test_other_documents_do_not_see_a_change_at_all(arrange: Arrange) -> None:
    losses, gradient = run_ranks(2, losses_and_gradient, arrange, 45, timeout=60)[0]
    changed, _ = run_ranks(2, losses_and_gradient, arrange, 55, timeout=60)[0]
    assert losses.abs().sum() > 0 and torch.equal(losses, changed)
    assert gradient[:40].abs().sum() > 0 and not gradient[45:50].any()


# -- the core attention by itself -----------------------------------------------------------


HEADS, D = 4, 4


def core(inside: Any = "sdpa", causal: bool = True, **config: Any) -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType

    from ulysses_mc.layers import UlyssesCoreAttention

    values = dict(hidden_size=HEADS * D, num_attention_heads=HEADS, params_dtype=torch.float64)
    return UlyssesCoreAttention(
        Setting(cp=2, config=values | config).transformer_config(),
        1,
        AttnMaskType.causal if causal else AttnMaskType.no_mask,
        "self",
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        core=inside,
    )


def without_causal_mask() -> None:
    """Where a query sees every key, it must not see the padding after its document."""
    from ulysses_mc.layers import packed_seq_params

    lengths, size = (3, 4, 1), 4
    with megatron_on_cpu():
        Setting(cp=2).initialize()
        rank, total = dist.get_rank(), size * len(lengths)
        padded = [0, *accumulate([size] * len(lengths))]
        real = [i for p, n in zip(padded, lengths, strict=False) for i in range(p, p + n)]
        cu = [0, *accumulate(lengths)]
        generator = torch.Generator().manual_seed(1)
        tensors = [
            torch.randn(total, HEADS, D, dtype=torch.float64, generator=generator) for _ in "qkv"
        ]
        right = oracle.attention(*(tensor[real] for tensor in tensors), cu_seqlens=cu)
        layout = SequenceLayout.zigzag_packed(padded, 2)
        params = packed_seq_params(cu, layout, cu_seqlens_padded=padded)
        own = [layout.shard(tensor, 0, rank).contiguous() for tensor in tensors]
        out = core(causal=False)(*own, None, packed_seq_params=params)
        shards = [torch.empty_like(out) for _ in range(2)]
        dist.all_gather(shards, out)
        found = layout.unshard(shards, 0)[real]
        torch.testing.assert_close(found, right.flatten(1), rtol=1e-10, atol=1e-10)


def test_padding_of_a_document_is_not_seen() -> None:
    run_ranks(2, without_causal_mask)


def one_contiguous_sequence() -> None:
    """Runs of different lengths around Megatron's own core attention, which cannot pack."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from ulysses_mc.layers import packed_seq_params

    with megatron_on_cpu():
        Setting(cp=2).initialize()
        rank, total = dist.get_rank(), 7
        generator = torch.Generator().manual_seed(1)
        tensors = [
            torch.randn(2, total, HEADS, D, dtype=torch.float64, generator=generator) for _ in "qkv"
        ]
        right = oracle.attention(*tensors, causal=True)
        layout = SequenceLayout.contiguous(total, 2)
        around = core(DotProductAttention)
        around.any_layout = True
        own = [layout.shard(tensor, 1, rank).transpose(0, 1).contiguous() for tensor in tensors]
        params = packed_seq_params([0, total], layout)
        out = around(*own, None, packed_seq_params=params)
        expected = layout.shard(right, 1, rank).transpose(0, 1).flatten(2)
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)

        params = packed_seq_params([0, 3, total], layout)
        with pytest.raises(ParallelConfigError, match="DotProductAttention"):
            around(*own, None, packed_seq_params=params)


def test_an_undivided_sequence_in_another_order() -> None:
    run_ranks(2, one_contiguous_sequence)


def what_does_not_fit() -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    from ulysses_mc.layers import packed_seq_params, wire_rope

    with megatron_on_cpu():
        Setting(cp=2).initialize()
        attention = core()
        thd = [torch.zeros(8, HEADS, D) for _ in "qkv"]
        params = packed_seq_params([0, 5, 16], SequenceLayout.contiguous(16, 2))
        with pytest.raises(ParallelConfigError, match=r"wire_rope\(model\)"):
            attention(*(tensor.unsqueeze(1) for tensor in thd), packed_seq_params=params)
        local = torch.tensor([0, 4, 8], dtype=torch.int32)
        theirs = PackedSeqParams(qkv_format="thd", cu_seqlens_q=local, cu_seqlens_kv=local)
        with pytest.raises(ParallelConfigError, match="gives 4 of 8 tokens to this rank"):
            attention(*thd, packed_seq_params=theirs)
        theirs.cu_seqlens_kv = torch.tensor([0, 2, 8], dtype=torch.int32)
        with pytest.raises(ParallelConfigError, match="the same in self-attention"):
            attention(*thd, packed_seq_params=theirs)
        theirs = PackedSeqParams(cu_seqlens_q=local, cu_seqlens_kv=local)
        with pytest.raises(ParallelConfigError, match="qkv_format None"):
            attention(*(tensor.unsqueeze(1) for tensor in thd), packed_seq_params=theirs)
        odd = torch.tensor([0, 6, 16], dtype=torch.int32)
        theirs = PackedSeqParams(qkv_format="thd", cu_seqlens_q=odd, cu_seqlens_kv=odd)
        with pytest.raises(ParallelConfigError, match=r"6 % \(2 x 2\)"):
            attention(*thd, packed_seq_params=theirs)
        with pytest.raises(ParallelConfigError, match="each no longer than with its padding"):
            packed_seq_params(
                [0, 6, 9], SequenceLayout.contiguous(16, 2), cu_seqlens_padded=[0, 4, 16]
            )
        padded = packed_seq_params(
            [0, 3, 9], SequenceLayout.zigzag_packed([0, 4, 16], 2), cu_seqlens_padded=[0, 4, 16]
        )
        with pytest.raises(
            ParallelConfigError, match="mtp_num_layers with documents packed over 2"
        ):
            core(mtp_num_layers=1)(*thd, packed_seq_params=padded)
        for config in (MLA, {"mtp_num_layers": 1}):
            chunks = gpt_chunks(Setting(cp=2, config=config), sdpa_spec)
            with pytest.raises(ParallelConfigError, match=f"a model with {next(iter(config))}"):
                wire_rope(chunks)


def test_what_does_not_fit_is_refused() -> None:
    run_ranks(2, what_does_not_fit)


def test_ours_says_what_megatrons_own_says() -> None:
    from ulysses_mc.layers import packed_seq_params

    layout = SequenceLayout.zigzag_packed([0, 4, 12], 2)
    params = packed_seq_params([0, 3, 8], layout, cu_seqlens_padded=[0, 4, 12], device="cpu")
    assert params.is_megatrons_order and params.max_seqlen_q == 8
    assert params.cu_seqlens_q.tolist() == [0, 3, 8]
    assert params.cu_seqlens_kv_padded.tolist() == [0, 4, 12]
    assert params.attended == (0, 3, 4, 9, 12)
    ends_early = packed_seq_params([0, 3, 8], SequenceLayout.contiguous(12, 2), device="cpu")
    assert ends_early.attended == ends_early.bounds == (0, 3, 8, 12)
    assert ends_early.cu_seqlens_q_padded is None and not ends_early.is_megatrons_order
    assert replace(ends_early, max_seqlen_q=1).layout == ends_early.layout
