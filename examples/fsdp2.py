"""A small Llama of Hugging Face transformers, its sequences split by Ulysses and its weights,
gradients and optimizer states sharded by PyTorch FSDP2 (ZeRO 3, or ZeRO 2 with --keep-weights).

    python examples/prepare_data.py
    torchrun --nproc-per-node 4 examples/fsdp2.py --ulysses 2
    torchrun --nproc-per-node 4 examples/fsdp2.py --ulysses 2 --hsdp     # shard within a sequence

Needs ulysses-mc[huggingface]. Runs on CPUs and on GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from pretraining.indexed import open_checked
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from ulysses_mc import (
    SequenceLayout,
    clip_gradients,
    cross_entropy,
    shard_batch,
    token_mean_loss,
)
from ulysses_mc.layers import use_ulysses
from ulysses_mc.parallel_state import ParallelConfig, initialize_model_parallel


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", type=Path, default=Path("runs/data/python_stdlib"))
    parser.add_argument("--ulysses", type=int, default=1, help="ranks that share a sequence")
    parser.add_argument("--hsdp", action="store_true", help="copies over dp, shards over ulysses")
    parser.add_argument("--keep-weights", action="store_true", help="whole weights until backward")
    parser.add_argument("--bf16", action="store_true", help="bf16 weights, fp32 reduction")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a data-parallel rank")
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-3)
    return parser.parse_args(argv)


def read_batch(tokens, step: int, length: int, rows: range, all_rows: int, device):
    """Random windows; every rank draws the same, and takes the rows of its data-parallel rank."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(tokens) - length, (all_rows,), generator=generator).tolist()
    windows = [torch.from_numpy(tokens[i : i + length + 1].astype("int64")) for i in starts]
    whole = torch.stack([windows[row] for row in rows]).to(device)
    return {"tokens": whole[:, :-1], "labels": whole[:, 1:]}  # shifted before they are cut


def main(argv: list[str] | None = None) -> list[float]:
    args = arguments(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    state = initialize_model_parallel(ParallelConfig(ulysses_parallel_size=args.ulysses))
    everyone = state.group("dp", "ulysses")
    facts = json.loads((args.data / "data.json").read_text())
    tokens = open_checked(str(args.data / "text"), facts["vocab_size"]).tokens

    torch.manual_seed(0)  # the same weights on every rank
    config = LlamaConfig(
        vocab_size=facts["vocab_size"],
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=args.sequence_length,
    )
    model = LlamaForCausalLM(config).to(device)
    layout = SequenceLayout.contiguous(args.sequence_length, args.ulysses)
    use_ulysses(model, state.group("ulysses"), layout)  # the one change to the model

    mesh = state.mesh("dp", "ulysses") if args.hsdp else state.mesh(("dp", "ulysses"))
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    options = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": not args.keep_weights}
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    all_rows = args.batch * state.world_size("dp")
    rows = range(args.batch * state.rank("dp"), args.batch * (state.rank("dp") + 1))
    losses = []
    for step in range(1, args.steps + 1):
        whole = read_batch(tokens, step, args.sequence_length, rows, all_rows, device)
        part = shard_batch(whole, layout, state.rank("ulysses"))
        logits = model(input_ids=part["tokens"]).logits  # [b, s/P, vocabulary]
        loss = token_mean_loss(*cross_entropy(logits, part["labels"]), everyone)
        optimizer.zero_grad()
        loss.backward()
        norm = clip_gradients(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if dist.get_rank() == 0 and (step % 10 == 0 or step == 1):
            print(f"iteration {step:5d} | lm loss {losses[-1]:.4f} | grad norm {norm:.3f}")
    if dist.get_rank() == 0:
        mean, entropy = sum(losses[-20:]) / len(losses[-20:]), facts["unigram_entropy_nats"]
        print(f"mean of the last 20: {mean:.4f}; loss without context: {entropy:.4f} (unigrams)")
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
