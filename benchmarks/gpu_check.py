"""Numbers of one GPU, for benchmarks/gpu_check.sh: copies, overhead, attention. No network.

The process group is PyTorch's `fake` one of 4 ranks, whose messages are not sent: what is timed
of the exchange is its packing and unpacking.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ulysses_mc import HeadLayout, SequenceLayout
from ulysses_mc.exchange import Cut, heads_to_sequence, sequence_to_heads
from ulysses_mc.layers import UlyssesAttention, explain_backend
from ulysses_mc.layers.local import flash_attention, sdpa_attention

RANKS, HEADS, KV, D = 4, 32, 8, 128


def seconds(function: Callable[[], Any], device: torch.device, rounds: int) -> float:
    """The median time of one call."""
    function()
    times = []
    for _ in range(rounds):
        synchronize(device)
        start = time.perf_counter()
        function()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def report_copies(tokens: int, device: torch.device, dtype: torch.dtype, rounds: int) -> None:
    """GB/s (read and written) of the two copies of an exchange, each beside a device copy of the
    same size: packing Q, K and V on the way in, and unpacking the output on the way back.

    Nothing is unpacked on the way in (b = 1, contiguous), nothing packed on the way back.
    """
    layout, group = SequenceLayout.contiguous(tokens * RANKS, RANKS), dist.group.WORLD
    heads = HeadLayout(HEADS, KV, RANKS)
    tensors = [torch.randn(tokens, 1, n, D, device=device, dtype=dtype) for n in (HEADS, KV, KV)]
    cuts = [Cut(layout, heads.query_heads), *[Cut(layout, heads.kv_heads)] * 2]
    own = len(heads.query_heads[0])
    out = torch.randn(tokens * RANKS, 1, own, D, device=device, dtype=dtype)
    directions = {
        "pack": (tensors, lambda: sequence_to_heads(tensors, cuts, group, transport="all_to_all")),
        "unpack": (
            [out],
            lambda: heads_to_sequence([out], cuts[:1], group, transport="all_to_all"),
        ),
    }
    for name, (moved, move) in directions.items():
        size = sum(tensor.numel() * tensor.element_size() for tensor in moved)
        source = torch.cat([tensor.flatten() for tensor in moved])
        copy = torch.empty_like(source)
        with torch.no_grad():
            plain = 2 * size / seconds(partial(copy.copy_, source), device, rounds) / 1e9
            rate = 2 * size / seconds(move, device, rounds) / 1e9
        print(f"  {tokens:>7} tokens a rank: {name:>6} {rate:7.1f} GB/s, copy {plain:7.1f} GB/s"
              f" ({rate / plain:.0%})", flush=True)  # fmt: skip


def report_attention(tokens: int, device: torch.device, dtype: torch.dtype, rounds: int) -> None:
    """Forward and backward of the bare kernel, and through UlyssesAttention with one rank."""
    shapes = [(1, tokens, n, D) for n in (HEADS, KV, KV)]
    leaves = [torch.randn(s, device=device, dtype=dtype).requires_grad_() for s in shapes]
    gradient = torch.randn(shapes[0], device=device, dtype=dtype)
    able = device.type == "cuda" and explain_backend(dtype=dtype, head_dim=D).chosen
    local = flash_attention if able else sdpa_attention
    wrapped = UlyssesAttention(dist.new_group([0]), local_attention=local)

    def both(attention: Callable[..., torch.Tensor]) -> Any:
        return torch.autograd.grad(attention(*leaves, causal=True), leaves, gradient)

    bare = seconds(lambda: both(local), device, rounds)
    ours = seconds(lambda: both(wrapped), device, rounds)
    # 2 products forward, 5 backward, of 2 operations; half of the pairs are masked out.
    flops = 7 * 2 * HEADS * D * tokens**2 / 2
    print(f"  {tokens:>7} tokens: {local.__name__} {flops / bare / 1e12:7.1f} TFLOP/s (causal),"
          f" UlyssesAttention at ulysses 1: {ours / bare - 1:+.1%}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, nargs="*", default=[4096, 16384, 65536])
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    print(torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU", dtype)
    print(f"packing and unpacking {HEADS} query and {KV} key/value heads of {D} for {RANKS} ranks")
    for tokens in options.tokens:
        report_copies(tokens, device, dtype, options.rounds)
    print("attention, forward and backward")
    print("  " + str(explain_backend(dtype=dtype, head_dim=D)).replace("\n", "\n  "))
    for tokens in options.tokens:
        report_attention(tokens, device, dtype, options.rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
