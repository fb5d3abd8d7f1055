"""GPUs, links, and how much of their data-sheet speed is reached."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from .problems import Problem, check, one_of, positive, read_text, unknown_keys, whole_number

GB = 1e9
GIB = float(2**30)


@dataclass(frozen=True, kw_only=True)
class Link:
    """A way between GPUs.

    Args:
        name: for people.
        bandwidth: bytes per second, one direction, per GPU.
        efficiency: part of it that large messages reach.
        latency: seconds per message (alpha).
    """

    name: str
    bandwidth: float
    efficiency: float
    latency: float

    def seconds(self, messages: float, nbytes: float, *, share: float = 1.0) -> float:
        """k x alpha + bytes / (bandwidth x efficiency); `share` GPUs' links carry it together."""
        return messages * self.latency + nbytes / (self.bandwidth * self.efficiency * share)


@dataclass(frozen=True, kw_only=True)
class GPU:
    """One GPU and its links.

    Args:
        memory: bytes that a program may use.
        peak_flops: dense bf16 FLOP/s. `peak_flops_fp8`: dense fp8; 0: none.
        memory_bandwidth: bytes per second of its HBM.
        gpus_per_node: GPUs of one NVLink domain.
        intra, inter: links inside and between domains.
        profile: what was measured, for people. measured: those links, by side and pattern.
        matrix_efficiency: part of the peak that a very large matrix product reaches.
        flash_efficiency: part of the bf16 peak that the attention kernel reaches.
    """

    name: str
    memory: float
    peak_flops: float
    peak_flops_fp8: float
    memory_bandwidth: float
    gpus_per_node: int
    intra: Link
    inter: Link
    matrix_efficiency: float = 0.8
    flash_efficiency: float = 0.55
    profile: str = ""
    measured: tuple[tuple[str, str, Link], ...] = ()

    def link(self, side: str, pattern: str) -> Link:
        """The link for a pattern of traffic: as measured, if it was.

        Args:
            side: 'intra' or 'inter'.
            pattern: 'ring' (all-gather and the like), 'all_to_all' or 'p2p'.
        """
        for measured_side, measured_pattern, link in self.measured:
            if (measured_side, measured_pattern) == (side, pattern):
                return link
        return self.intra if side == "intra" else self.inter


def _nvlink(gigabytes: float) -> Link:
    # Efficiency and latency: Calculon's systems/*.json (Isaev et al., SC'23).
    return Link(name="NVLink", bandwidth=gigabytes * GB, efficiency=0.65, latency=10e-6)


def _infiniband(gigabytes: float) -> Link:
    return Link(name="InfiniBand", bandwidth=gigabytes * GB, efficiency=0.9, latency=20e-6)


# Data sheets: memory GiB as the driver reports it, bf16 and fp8 dense TFLOP/s, HBM TB/s, GPUs of
# an NVLink domain, NVLink and network GB/s in one direction, efficiencies of matrix products and
# attention. The matrix efficiency of A100 is fitted to arXiv 2205.05198, table 5; attention's is
# what FlashAttention 2 (A100) and 3 (Hopper) publish for long sequences, forward and backward.
_SHEET = {
    "a100-40g": (39.5, 312, 0, 1.555, 8, 300, 25, 0.80, 0.60),
    "a100-80g": (79.2, 312, 0, 2.039, 8, 300, 25, 0.80, 0.60),
    "h100": (79.1, 989, 1979, 3.35, 8, 450, 50, 0.75, 0.55),
    "h200": (139.8, 989, 1979, 4.8, 8, 450, 50, 0.75, 0.55),
    "b200": (178.4, 2250, 4500, 8.0, 8, 900, 50, 0.70, 0.50),
    "gb200-nvl72": (184.0, 2450, 4900, 8.0, 72, 900, 50, 0.70, 0.50),
}
GPUS = {
    name: GPU(
        name=name, memory=gib * GIB, peak_flops=bf16 * 1e12, peak_flops_fp8=fp8 * 1e12,
        memory_bandwidth=hbm * 1e12, gpus_per_node=domain, intra=_nvlink(nvlink),
        inter=_infiniband(net), matrix_efficiency=matrix, flash_efficiency=flash,
    )
    for name, (gib, bf16, fp8, hbm, domain, nvlink, net, matrix, flash) in _SHEET.items()
}  # fmt: skip
_ALIASES = {"a100": "a100-80g", "h100-80g": "h100", "gb200": "gb200-nvl72", "nvl72": "gb200-nvl72"}
_NUMBERS = ("memory_gib", "peak_tflops", "peak_tflops_fp8", "memory_tb_s", "intra_gb_s",
            "inter_gb_s")  # fmt: skip


def gpu_names() -> list[str]:
    return [*GPUS, *_ALIASES]


def read_gpu(text: str, gpus_per_node: int | None = None, profile: str | None = None) -> GPU:
    """A GPU by name, or by numbers: 'h100,memory_gib=64,inter_gb_s=12.5'.

    Args:
        text: a name; or name=value pairs after a name, of memory_gib, peak_tflops,
            peak_tflops_fp8, memory_tb_s, intra_gb_s, inter_gb_s.
        gpus_per_node: GPUs of one fast domain, other than the GPU's own.
        profile: files that `ulysses-mc bench` wrote, with commas; their links replace the
            defaults.

    Raises:
        RequestError: unknown name or key, or a value that is no number above 0.
    """
    name, *pairs = (part.strip() for part in text.lower().split(","))
    name = _ALIASES.get(name, name)
    problems = one_of("gpu", name, gpu_names())
    if problems and not problems[0].nearest:
        other = "for another GPU, its numbers after a name: h100,memory_gib=24,peak_tflops=165"
        problems = [replace(problems[0], nearest=other)]
    values: dict[str, float] = {}
    for pair in pairs:
        key, _, raw = pair.partition("=")
        problems += unknown_keys([key], _NUMBERS)
        try:
            values[key] = float(raw)
        except ValueError:
            problems.append(Problem(f"gpu: {pair!r}", "pairs are name=number", f"{key}=1"))
            continue
        problems += [] if key == "peak_tflops_fp8" else positive(f"gpu {key}", values[key])
    if gpus_per_node is not None:
        problems += whole_number("gpus_per_node", gpus_per_node)
    check(problems)
    gpu = _with_numbers(GPUS[name], values)
    if gpus_per_node is not None:
        gpu = replace(gpu, gpus_per_node=gpus_per_node)
    for path in profile.split(",") if profile else ():
        gpu = with_profile(gpu, path)
    return gpu


def _with_numbers(gpu: GPU, values: dict[str, float]) -> GPU:
    scale = {"memory_gib": ("memory", GIB), "peak_tflops": ("peak_flops", 1e12),
             "peak_tflops_fp8": ("peak_flops_fp8", 1e12),
             "memory_tb_s": ("memory_bandwidth", 1e12)}  # fmt: skip
    changes: dict[str, Any] = {
        scale[key][0]: value * scale[key][1] for key, value in values.items() if key in scale
    }
    for key, side in (("intra_gb_s", "intra"), ("inter_gb_s", "inter")):
        if key in values:
            changes[side] = replace(getattr(gpu, side), bandwidth=values[key] * GB)
    return replace(gpu, name=f"{gpu.name}*" if values else gpu.name, **changes)


@dataclass(frozen=True)
class Measured:
    """What `ulysses-mc bench` fitted: seconds = alpha + bytes / beta, per operation."""

    backend: str
    ranks: int
    nodes: int
    fits: dict[str, tuple[float, float]] = field(default_factory=dict)


def read_profile(path: str) -> Measured:
    """Reads a profile.

    Raises:
        RequestError: no such file, or not one that bench wrote.
    """
    rule = "a profile is a file that `ulysses-mc bench --output FILE` wrote"
    text = read_text(path, rule)
    try:
        data = json.loads(text)
        fits = {
            name: (float(fit["alpha_seconds"]), float(fit["bytes_per_second"]))
            for name, fit in data["fits"].items()
        }
        measured = Measured(data["backend"], int(data["ranks"]), int(data["nodes"]), fits)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        check([Problem(f"profile {path}: {type(error).__name__}: {error}", rule)])
        raise AssertionError from error
    bad = [name for name, (alpha, beta) in fits.items()
           if not 0 <= alpha < inf or not 0 < beta < inf]  # fmt: skip
    check(Problem(f"profile {path}: {name} has no positive speed", rule) for name in bad)
    return measured


_MEASURED_BY = {"all_to_all": "all_to_all", "ring": "all_gather", "p2p": "p2p"}


def with_profile(gpu: GPU, path: str) -> GPU:
    """`gpu` with measured links: the inner ones if one node was measured, else the outer."""
    found = read_profile(path)
    side = "intra" if found.nodes == 1 else "inter"
    links = []
    for pattern, operation in _MEASURED_BY.items():
        if operation in found.fits:
            alpha, beta = found.fits[operation]
            name = f"{getattr(gpu, side).name} (measured)"
            link = Link(name=name, bandwidth=beta, efficiency=1.0, latency=alpha)
            links.append((side, pattern, link))
    kept = tuple(entry for entry in gpu.measured if entry[0] != side)
    words = f"{side} measured with {found.backend} over {found.ranks} ranks"
    return replace(
        gpu,
        measured=(*kept, *links),
        profile=f"{gpu.profile}; {words}" if gpu.profile else words,
    )
