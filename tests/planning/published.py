"""Published numbers, and what the planner computes for the same run.

A `Row` is one number: where it comes from, what it says, what we say. F rows come from a formula
in the source and must agree; M rows were measured, and their error is printed and bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ulysses_mc.planning.activations import layer_activations
from ulysses_mc.planning.estimate import Estimate
from ulysses_mc.planning.hardware import GIB, GPUS
from ulysses_mc.planning.job import Job, Setting
from ulysses_mc.planning.memory import activation_bytes, in_flight, memory, states
from ulysses_mc.planning.model import ModelShape
from ulysses_mc.planning.presets import PRESETS, _gpt

MEGATRON = "arXiv 2205.05198"
PLAYBOOK = "Ultra-Scale Playbook"
ALST = "ArcticTraining recipes"
LLAMA_8B = PRESETS["llama-3.1-8b"]


@dataclass(frozen=True)
class Row:
    source: str
    what: str
    unit: str
    published: float
    compute: Callable[[], float]
    limit: float = 0.25  # of the error of an M row; above it, docs/planning.md says why

    def __str__(self) -> str:
        return f"{self.source}: {self.what}"

    def error(self) -> float:
        return self.compute() / self.published - 1


# -- F: formulas ----------------------------------------------------------------------------------

# model, GPUs, pipeline, chunks, micro-batch, states, activations without and with recomputation
_FIGURE_1 = [
    ("megatron-22b", 8, 1, 1, 4, 45.5625, 59.25, 9.5625),
    ("gpt3-175b", 64, 8, 3, 1, 45.5625, 66.84375, 12.3515625),
    ("megatron-530b", 280, 35, 3, 1, 31.640625, 114.0234375, 23.076171875),
    ("megatron-1t", 512, 64, 1, 1, 32.958984375, 131.25, 26.5625),
]


def formula_rows() -> Iterator[Row]:
    for name, gpus, pp, vpp, micro, want_states, want_none, want_selective in _FIGURE_1:
        setting = Setting(tp=8, pp=pp, vpp=vpp, micro_batch=micro)
        job = Job(
            model=PRESETS[name], gpu=GPUS["a100-80g"], num_gpus=gpus, seq_length=2048,
            global_batch_size=1024, zero_stage=0, attention="unfused", tp_sequence_sharding=False,
        )  # fmt: skip
        figure = f"{MEGATRON} fig. 1"
        yield Row(figure, f"{name} states", "GiB", want_states, _layer_states(job, setting))
        what = f"{name} activations, "
        yield Row(figure, what + "none", "GiB", want_none, _activations(job, setting))
        sharded = replace(job, tp_sequence_sharding=True)
        selective = setting.with_recompute("selective")
        compute = _activations(sharded, selective)
        yield Row(figure, what + "selective", "GiB", want_selective, compute)

    # The Playbook counts Llama's layer as GPT's, 34 bytes a token and hidden unit; at one GPU
    # Llama's own count is the same, with TP its layer has no dropout masks (336, not 352).
    gpt = replace(_gpt("gpt as wide", 32, 4096, 32), learned_positions=0)
    long = Job(
        model=gpt, gpu=GPUS["h100"], num_gpus=8, seq_length=131072, global_batch_size=8,
        tp_sequence_sharding=False,
    )  # fmt: skip
    llama = replace(long, model=LLAMA_8B)
    yield Row(PLAYBOOK, "Llama-3-8B at 128K, T1", "GiB", 544, _activations(llama, Setting()))
    yield Row(PLAYBOOK, "GPT layer at 128K, T1", "GiB", 544, _activations(long, Setting()))
    yield Row(PLAYBOOK, "GPT layer at 128K, T2", "GiB", 352, _activations(long, Setting(tp=2)))
    yield Row(PLAYBOOK, "T2 CP4", "GiB", 88, _activations(long, Setting(tp=2, ring=4)))
    plain = replace(llama, zero_stage=0, gradient_bytes=2, master_weights=False)
    for part, want in (("parameters", 14.96), ("gradients", 14.96), ("optimizer", 59.83)):
        yield Row(PLAYBOOK, f"Llama-3-8B {part}", "GiB", want, _part(plain, Setting(), part))

    yield Row(
        "Megatron-Bridge performance summary", "405B at 8K, 326 tok/s as TFLOP/s", "TFLOP/s", 822,
        lambda: PRESETS["llama-3.1-405b"].flops_per_token(8192) * 326 / 1e12,
    )  # fmt: skip


def _layer_states(job: Job, setting: Setting) -> Callable[[], float]:
    """The figure counts 12 L h^2 weights: no embedding, norm or bias."""

    def compute() -> float:
        model = job.model
        each = model.sharded_attention_parameters + model.mlp_parameters(model.ffn_hidden_size)
        count = each * model.num_layers / (setting.tp * setting.pp)
        return sum(states(job, setting, count, 0.0)) / GIB

    return compute


def _activations(job: Job, setting: Setting) -> Callable[[], float]:
    def compute() -> float:
        layer = layer_activations(job, setting)
        layers = job.model.num_layers // setting.pp
        kept = activation_bytes(job, setting, layer, None, layers)
        return kept * in_flight(setting, 10**6) / GIB

    return compute


def _part(job: Job, setting: Setting, part: str) -> Callable[[], float]:
    return lambda: memory(job, setting).parts()[part] / GIB


# -- M: measured ----------------------------------------------------------------------------------


def measured_rows() -> Iterator[Row]:
    yield from _table_5()
    yield from _mt_nlg()
    yield _llama_405b()
    yield from _alst()
    yield from _deepspeed_ulysses()
    yield from _fpdt()


def _table_5() -> Iterator[Row]:
    measured = {"megatron-22b": (4, 1.10), "gpt3-175b": (64, 13.75),
                "megatron-530b": (280, 37.83), "megatron-1t": (512, 71.49)}  # fmt: skip
    for name, gpus, pp, vpp, micro, *_ in _FIGURE_1:
        batch, seconds = measured[name]
        job = Job(
            model=PRESETS[name], gpu=GPUS["a100-80g"], num_gpus=gpus, seq_length=2048,
            global_batch_size=batch, zero_stage=0, attention="unfused",
        )  # fmt: skip
        setting = Setting(tp=8, pp=pp, vpp=vpp, micro_batch=micro, recompute="selective")
        yield Row(f"{MEGATRON} table 5", name, "s", seconds, _seconds(job, setting))


def _mt_nlg() -> Iterator[Row]:
    model = PRESETS["megatron-530b"]
    # The source's convention: 96 B s L h^2 (1 + s/6h + V/16Lh), recomputation counted.
    h, layers = model.hidden_size, model.num_layers
    flops = 96 * 1920 * 2048 * layers * h**2
    flops *= 1 + 2048 / (6 * h) + model.vocab_size / (16 * layers * h)
    for gpus, teraflops in ((2240, 126), (2800, 121), (3360, 113)):
        job = Job(
            model=model, gpu=GPUS["a100-80g"], num_gpus=gpus, seq_length=2048,
            global_batch_size=1920, zero_stage=0, attention="unfused", tp_sequence_sharding=False,
        )  # fmt: skip
        setting = Setting(tp=8, pp=35, dp=gpus // 280, recompute="full")
        yield Row(
            "arXiv 2201.11990", f"MT-NLG on {gpus} A100", "TFLOP/s", teraflops,
            lambda job=job, setting=setting: (  # type: ignore[misc]
                flops / Estimate.of(job, setting).seconds / job.num_gpus / 1e12
            ),
            limit=0.35,
        )  # fmt: skip


def _llama_405b() -> Row:
    job = Job(
        model=PRESETS["llama-3.1-405b"], gpu=GPUS["h100"], num_gpus=1024, seq_length=8192,
        global_batch_size=1536, precision="fp8", tp_overlap=True,
    )  # fmt: skip
    setting = Setting(tp=8, pp=8, vpp=8, ring=2, dp=8)
    return Row(
        "Megatron-Bridge performance summary", "405B FP8, 1024 H100", "tok/s/GPU", 326,
        lambda: Estimate.of(job, setting).tokens_per_second_per_gpu,
    )  # fmt: skip


def _alst() -> Iterator[Row]:
    one = Job(
        model=LLAMA_8B, gpu=GPUS["h200"], num_gpus=1, seq_length=300_000, global_batch_size=1,
        zero_stage=3, offload_optimizer=True, offload_parameters=True, tiled_logits=True,
    )  # fmt: skip
    offload = replace(one, seq_length=650_000, offload_checkpoints=True)
    tiled = replace(offload, seq_length=1_200_000, tiled_mlp=True)
    full = Setting(recompute="full")
    for job, gib in ((one, 134.96), (offload, 126.8), (tiled, 136.15)):
        what = f"Llama-3-8B, {job.seq_length:,} tokens on 1 H200"
        yield Row(ALST, what, "GiB", gib, _gib(job, full))
    for gpus, tokens in ((1, 500_000), (8, 3_800_000), (16, 8_000_000), (32, 15_500_000)):
        job = replace(tiled, gpu=GPUS["h100"], num_gpus=gpus, offload_parameters=gpus == 1)
        yield Row(
            ALST, f"Llama-3-8B, longest on {gpus} H100", "tokens", tokens,
            _longest(job, replace(full, ulysses=gpus)), limit=0.6 if gpus == 1 else 0.25,
        )  # fmt: skip


def _deepspeed_ulysses() -> Iterator[Row]:
    model: ModelShape = replace(
        _gpt("gpt-1.2b", 24, 2048, 16), learned_positions=0, hidden_dropout=False
    )
    for gpus, thousands in ((8, 128), (16, 256), (32, 512), (64, 1024)):
        job = Job(
            model=model, gpu=GPUS["a100-40g"], num_gpus=gpus, seq_length=1024,
            global_batch_size=1, zero_stage=3,
        )  # fmt: skip
        setting = Setting(ulysses=min(gpus, 16), ring=gpus // min(gpus, 16))
        longest = _longest(job, setting)
        yield Row(
            "DeepSpeed-Ulysses report", f"1.2B, longest power of two on {gpus} A100-40G", "tokens",
            thousands * 1024, lambda longest=longest: 2.0 ** (int(longest()).bit_length() - 1),  # type: ignore[misc]
        )  # fmt: skip


def _fpdt() -> Iterator[Row]:
    job = Job(
        model=LLAMA_8B, gpu=GPUS["a100-80g"], num_gpus=8, seq_length=65536, global_batch_size=1,
        zero_stage=3,
    )  # fmt: skip
    source, what = "DeepSpeed FPDT blog", "Llama-3-8B, 8 x 80 GB, "
    yield Row(source, what + "64K", "GiB", 52.3, _gib(job, Setting(ulysses=8)))
    long = replace(job, seq_length=524288, offload_checkpoints=True)
    full = Setting(ulysses=8, recompute="full")
    yield Row(source, what + "512K, recompute, offload", "GiB", 60.1, _gib(long, full))
    yield Row(source, what + "512K", "% MFU", 47.2, lambda: 100 * Estimate.of(long, full).mfu)


def _seconds(job: Job, setting: Setting) -> Callable[[], float]:
    return lambda: Estimate.of(job, setting).seconds


def _gib(job: Job, setting: Setting) -> Callable[[], float]:
    """Measured peaks are what the allocator gave out; the margin is what we keep on top."""

    def compute() -> float:
        used = memory(job, setting)
        return (used.total - used.margin) / GIB

    return compute


def _longest(job: Job, setting: Setting) -> Callable[[], float]:
    """The most tokens, in thousands of 1,024, whose memory fits."""

    def fits(blocks: int) -> bool:
        used = memory(replace(job, seq_length=1024 * blocks), setting)
        return used.total <= job.gpu.memory

    def compute() -> float:
        low, high = 1, 1 << 16
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return 1024.0 * low

    return compute
