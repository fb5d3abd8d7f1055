"""Row 21: middle pipeline stages lack cu_seqlens; shapes of variable length swapped or hanging.

Micro-batches of different lengths, packed, against one rank that sees each of them as one
ordinary sequence under a block-diagonal mask (Megatron's own attention, no code of ours).
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from tests.megatron.gathering import Step
from tests.megatron.packed_gpt import Arrange, contiguous, train, unpacked, zigzag
from tests.megatron.small_gpt import Setting
from tests.megatron.test_parity import assert_same
from tests.support.pool import run_ranks

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(torch.cuda.is_available(), reason="compares CPU ranks"),
]
pytest.importorskip("megatron.core")

GQA = {
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "variable_seq_lengths": True,
    "moe_token_dispatcher_type": "alltoall",  # asked for with variable lengths, experts or not
}
TP_SP = {"sequence_parallel": True}


@functools.cache
def one_rank(positions: str) -> list[Step]:
    setting = Setting(positions=positions, config=GQA)
    return run_ranks(1, train, setting, unpacked, timeout=60)[0]


@pytest.mark.parametrize(
    ("setting", "arrange"),
    [
        (Setting(pp=2, cp=2, config=GQA), zigzag),
        (Setting(pp=2, cp=2, config=GQA), contiguous),
        (Setting(pp=2, cp=2, positions="learned_absolute", config=GQA), contiguous),
        (Setting(tp=2, pp=2, cp=2, config=GQA | TP_SP), zigzag),
        (Setting(tp=2, pp=2, cp=2, config=GQA), contiguous),
        (Setting(tp=2, pp=4, config=GQA), zigzag),
        (Setting(pp=2, vpp=2, cp=2, config=GQA), zigzag),
        (Setting(tp=2, pp=2, vpp=2, cp=2, config=GQA), contiguous),
    ],
    ids=[
        "pp2-ulysses2-zigzag",
        "pp2-ulysses2-contiguous",
        "pp2-ulysses2-absolute-positions",
        "tp2-pp2-ulysses2-tpsp-zigzag",
        "tp2-pp2-ulysses2-contiguous",
        "tp2-pp4",
        "interleaved-pp2-ulysses2-zigzag",
        "interleaved-tp2-pp2-ulysses2-contiguous",
    ],
)
def test_equals_one_rank(setting: Setting, arrange: Arrange) -> None:
    world = setting.tp * setting.pp * setting.cp
    for steps in run_ranks(world, train, setting, arrange, timeout=120):
        assert_same(one_rank(setting.positions), steps)


def refused_when_mixed(config: dict[str, bool]) -> None:
    from tests.megatron.packed_gpt import sdpa_spec
    from tests.megatron.small_gpt import gpt_chunks
    from ulysses_mc import ParallelConfigError, megatron_on_cpu
    from ulysses_mc.layers import check_wired
    from ulysses_mc.parallel_state import ParallelConfig, initialize_model_parallel

    setting = Setting(pp=2, vpp=2, config=GQA | config)
    with megatron_on_cpu():
        state = initialize_model_parallel(
            ParallelConfig(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
        )
        try:
            with pytest.raises(ParallelConfigError, match="mistaken for one another"):
                check_wired(gpt_chunks(setting, sdpa_spec), state)
            check_wired(gpt_chunks(replace(setting, config=GQA), sdpa_spec), state)
        finally:
            state.destroy()


@pytest.mark.parametrize(
    "config",
    [
        dict(overlap_p2p_comm=False, batch_p2p_comm=True, variable_seq_lengths=False),
        dict(overlap_p2p_comm=False, batch_p2p_comm=False),
    ],
    ids=["batched", "variable"],
)
def test_messages_that_would_mix_are_refused(config: dict[str, bool]) -> None:
    run_ranks(2, refused_when_mixed, config)
