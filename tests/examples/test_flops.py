"""FLOPs of a step and peaks of GPUs, against counts by hand."""

import pytest

pytest.importorskip("jsonargparse")
from examples.pretraining.flops import flops_per_step, peak_tflops
from examples.pretraining.preflight import check
from tests.examples.test_config import config

# 4 query heads and 2 key/value heads of 8; every number below counts multiply-adds of one token.
SIZES = [
    "--model.num_layers=3", "--model.hidden_size=32", "--model.num_attention_heads=4",
    "--model.num_query_groups=2", "--model.ffn_hidden_size=64", "--model.seq_length=16",
    "--batch.global_batch_size=4",
]  # fmt: skip
TOKENS = 4 * 16
QUERY_AND_OUTPUT = 32 * 32 + 32 * 32
KEY_AND_VALUE = 32 * 16 + 32 * 16
SCORES_AND_VALUES = 2 * 4 * 8 * (16 / 2)  # a token sees half of the others, on average
ATTENTION = QUERY_AND_OUTPUT + KEY_AND_VALUE + SCORES_AND_VALUES
LOGITS = 32 * 384  # the data's 300 tokens, in multiples of 128
DENSE = 3 * (ATTENTION + 3 * 32 * 64) + LOGITS
# Forward once, backward twice; a multiply-add is two operations.
STEP = TOKENS * 3 * 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], DENSE),
        (["--model.swiglu=false"], DENSE - 3 * 32 * 64),
        (["--model.recompute=full"], DENSE),
        # Two experts of 48 see each token.
        (["--model.transformer={num_moe_experts: 4, moe_router_topk: 2, moe_ffn_hidden_size: 48}"],
         3 * (ATTENTION + 2 * 3 * 32 * 48) + LOGITS),
        (["--model.transformer={num_moe_experts: 4, moe_router_topk: 1}"], DENSE),
        (["--model.transformer.kv_channels=16"], DENSE + 3 * ATTENTION),  # heads twice as wide
    ],
    ids=["dense", "gelu", "recompute", "experts", "one-expert", "wide-heads"],
)  # fmt: skip
def test_flops_of_a_step(data: str, options: list[str], expected: float) -> None:
    given = config(*SIZES, *options, f"--data.path=[{data}]")
    assert flops_per_step(given, check(given, 1)) == STEP * expected


def test_flops_of_a_hybrid_and_of_what_is_not_known(data: str) -> None:
    given = config(*SIZES, f"--data.path=[{data}]")
    shape = check(given, 1)
    given.model.kind, given.model.hybrid_layer_pattern = "hybrid", "*-|--"
    assert flops_per_step(given, shape) == STEP * (ATTENTION + 3 * 3 * 32 * 64 + LOGITS)
    given.model.hybrid_layer_pattern = "*-M-"
    assert flops_per_step(given, shape) is None
    given.model.kind, given.model.transformer = "gpt", {"multi_latent_attention": True}
    assert flops_per_step(given, shape) is None


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA GB200", 2500),
        ("NVIDIA B200", 2250),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A40", 149.7),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_peak_of_a_device(device: str, expected: float | None) -> None:
    assert peak_tflops(device) == expected
