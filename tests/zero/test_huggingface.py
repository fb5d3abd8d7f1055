"""A Hugging Face model split over a Ulysses group equals itself in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import run_ranks
from tests.zero.models import llama, seeded, tokens
from ulysses_mc import ParallelConfigError, SequenceLayout, cross_entropy, shift_labels
from ulysses_mc.layers import use_ulysses

pytest.importorskip("transformers")
pytestmark = pytest.mark.huggingface


def run(
    layout: SequenceLayout,
    inputs: dict[str, Any],
    local: tuple[str, ...] = (),
    *,
    make: Any = llama,
    changes: dict[str, Any] | None = None,
    valid: torch.Tensor | None = None,
    checkpointing: bool = False,
) -> None:
    """One rank: logits and all gradients against the model that sees everything.

    Args:
        inputs: for the whole model.
        local: names of those that are cut.
        valid: [b, s], tokens whose logits count.
    """
    group, rank = dist.group.WORLD, dist.get_rank()
    whole_model = make(**(changes or {}))
    model = make(**(changes or {}))
    ids = inputs["input_ids"]
    labels = shift_labels(ids)
    if valid is not None:
        labels = labels.masked_fill(~valid, -100)
    expected = whole_model(**inputs).logits
    total, _ = cross_entropy(expected, labels)
    total.backward()

    use_ulysses(model, group, layout)
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    shard = {n: layout.shard(v, 1, rank) if n in local else v for n, v in inputs.items()}
    actual = model(**{**shard, "input_ids": layout.shard(ids, 1, rank)}).logits
    part, _ = cross_entropy(actual, layout.shard(labels, 1, rank))
    part.backward()
    mine = layout.shard(expected, 1, rank)
    if valid is not None:
        kept = layout.shard(valid, 1, rank)
        mine, actual = mine[kept], actual[kept]
    torch.testing.assert_close(actual, mine, rtol=1e-10, atol=1e-10)
    for (name, weight), other in zip(
        model.named_parameters(), whole_model.parameters(), strict=True
    ):
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        dist.all_reduce(gradient)
        scale = other.grad.abs().max().item()
        assert (gradient - other.grad).abs().max().item() <= 1e-10 * scale, name


EVEN, UNEVEN = SequenceLayout.contiguous(12, 2), SequenceLayout.from_lengths([3, 5, 1, 3])
IDS = tokens(2, 12)


@pytest.mark.parametrize(
    "layout",
    [EVEN, UNEVEN, SequenceLayout.contiguous(13, 4), SequenceLayout.zigzag(16, 4)],
    ids=["even", "uneven", "13 over 4", "zigzag"],
)
def test_equals_one_process(layout: SequenceLayout) -> None:
    run_ranks(layout.group_size, run, layout, {"input_ids": tokens(2, layout.sequence_length)})


def test_group_of_one() -> None:
    run_ranks(1, run, SequenceLayout.contiguous(12, 1), {"input_ids": IDS})


def test_recomputation() -> None:
    run_ranks(2, run, EVEN, {"input_ids": IDS}, checkpointing=True)


def test_heads_that_do_not_divide() -> None:
    changes = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
    run_ranks(4, run, UNEVEN, {"input_ids": IDS}, changes=changes)


PACKED = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3]])
OTHER = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 0, 1]])


@pytest.mark.parametrize(
    "positions", [PACKED, torch.cat([PACKED, OTHER])], ids=["alike", "other documents per sample"]
)
def test_packed_by_positions(positions: torch.Tensor) -> None:
    ids = IDS[: len(positions)]
    # transformers itself reads documents off positions only without a cache
    inputs = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    run_ranks(4, run, UNEVEN, inputs, ("position_ids",))


def test_packed_by_boundaries() -> None:
    run_ranks(2, run_boundaries)


def run_boundaries() -> None:
    """Named by cu_seqlens, and read off positions: the same."""
    rank = dist.get_rank()
    model = llama()
    expected = llama()(input_ids=IDS[:1], position_ids=PACKED, use_cache=False).logits
    use_ulysses(model, dist.group.WORLD)
    for name in ("cu_seqlens", "cu_seq_lens_q"):
        boundaries = {name: torch.tensor([0, 3, 8, 12], dtype=torch.int32)}
        logits = model(EVEN.shard(IDS[:1], 1, rank), **boundaries).logits
        torch.testing.assert_close(logits, EVEN.shard(expected, 1, rank), rtol=1e-10, atol=1e-10)


def test_padding_on_the_right() -> None:
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, 7:] = 0
    inputs = {"input_ids": IDS, "attention_mask": mask}
    run_ranks(4, run, UNEVEN, inputs, valid=mask.bool())


def test_padding_on_the_left_with_positions() -> None:
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    inputs = {"input_ids": IDS, "attention_mask": mask, "position_ids": positions}
    run_ranks(2, run, EVEN, inputs, ("position_ids",), valid=mask.bool())


@pytest.mark.parametrize("additive", [False, True])
def test_whole_mask_replaces_the_causal_one(additive: bool) -> None:
    mask = torch.ones(12, 12, dtype=torch.bool).tril(2)[None, None].expand(2, 1, 12, 12)
    if additive:
        mask = torch.zeros(2, 1, 12, 12).double().masked_fill(~mask, torch.finfo().min)
    run_ranks(2, run, EVEN, {"input_ids": IDS, "attention_mask": mask})


@pytest.mark.parametrize("family", ["Mistral", "Qwen3", "GptOss"])
def test_sliding_windows_and_sinks(family: str) -> None:
    run_ranks(2, run, EVEN, {"input_ids": IDS}, make=windowed, changes={"family": family})


def windowed(family: str) -> Any:
    import transformers

    changes: dict[str, Any] = {"sliding_window": 3, "head_dim": 8}
    if family != "Mistral":
        changes["layer_types"] = ["sliding_attention", "full_attention"]
    if family == "Qwen3":
        changes["use_sliding_window"] = True
    if family == "GptOss":
        changes["experts_implementation"] = "eager"  # the grouped kernel has no float64
        changes |= {"num_local_experts": 2, "num_experts_per_tok": 2}
    config_class = getattr(transformers, f"{family}Config")
    model_class = getattr(transformers, f"{family}ForCausalLM")
    return seeded(model_class, config_class, torch.float64, **changes)


def test_two_models_in_one_process() -> None:
    run_ranks(2, run_two)


def run_two() -> None:
    rank = dist.get_rank()
    sizes = [{"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 6}, {}]
    models, whole = ([llama(**size) for size in sizes] for _ in range(2))
    for model in models:
        use_ulysses(model, dist.group.WORLD, EVEN)
    for model, one in zip(models, whole, strict=True):
        torch.testing.assert_close(
            model(EVEN.shard(IDS, 1, rank)).logits,
            EVEN.shard(one(IDS).logits, 1, rank),
            rtol=1e-10,
            atol=1e-10,
        )
    longer = SequenceLayout.from_lengths([7, 2])  # of one call alone
    ids = tokens(1, 9)
    torch.testing.assert_close(
        models[1].model(longer.shard(ids, 1, rank), sequence_layout=longer).last_hidden_state,
        longer.shard(whole[1].model(ids).last_hidden_state, 1, rank),
        rtol=1e-10,
        atol=1e-10,
    )
    assert "ulysses" not in models[0].config.to_json_string()


REFUSED = {
    "labels": {"labels": True},
    "use_cache": {"use_cache": True},
    "from 0 on each": {"position_ids": torch.arange(6)[None]},
    "mask is whole": {"attention_mask": torch.ones(2, 6)},
    "padding before tokens": {"attention_mask": torch.arange(12).expand(2, -1) > 3},
    "position_ids of shape": {"position_ids": torch.arange(12)[None]},
    "output_attentions": {"output_attentions": True},
    "by a layout of": {"sequence_layout": UNEVEN},
    "without tokens": {"sequence_layout": SequenceLayout.from_lengths([6, 0])},
    "without input_ids": {"input_ids": None},
}


def test_refused_inputs() -> None:
    run_ranks(2, run_refused)


def run_refused() -> None:
    rank = dist.get_rank()
    model = llama()
    use_ulysses(model, dist.group.WORLD)
    ids = EVEN.shard(IDS, 1, rank)
    for message, inputs in REFUSED.items():
        inputs = {"input_ids": ids, **inputs}
        if "labels" in inputs:
            inputs["labels"] = ids
        with pytest.raises(ParallelConfigError, match=message):
            model(**inputs)
    copy.deepcopy(model)(ids)  # nothing is left behind
    with pytest.raises(ParallelConfigError, match="already"):
        use_ulysses(model, dist.group.WORLD)
    with pytest.raises(ParallelConfigError, match="word of the whole sequence"):
        type(model)(model.config)(ids)  # another model, same config
    with pytest.raises(ParallelConfigError, match="softcap"):
        capped = seeded(*gemma2(), torch.float64)
        use_ulysses(capped, dist.group.WORLD)
        capped(ids)


def gemma2() -> tuple[Any, Any]:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM, Gemma2Config


def test_refused_models() -> None:
    run_ranks(1, run_refused_models)


def run_refused_models() -> None:
    import transformers

    group = dist.group.WORLD
    mamba = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1)
    )
    bloom = transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=8, hidden_size=8, n_layer=1, n_head=2)
    )
    chunked = llama(layer_types=["chunked_attention", "full_attention"])
    for model in (mamba, bloom, chunked, torch.nn.Linear(2, 2)):
        with pytest.raises(ParallelConfigError, match="use_ulysses on"):
            use_ulysses(model, group)
    with pytest.raises(ParallelConfigError, match="group=None"):
        use_ulysses(llama(), None)
