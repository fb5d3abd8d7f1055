"""From a checked config to a finished run: process group, model, data, training, summary."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .checkpoint import CheckpointNotWritten, Progress
from .config import Config
from .errors import SeenByOneRank, UserError
from .indexed import open_checked, unigram_entropy
from .liveness import ALIKE, RankLost, watched
from .lock import only_run_in
from .manifest import LATEST, newest
from .preflight import RunShape, data_prefixes

if TYPE_CHECKING:
    from .trainer import Trainer


def run(config: Config, shape: RunShape) -> int:
    """Runs on every rank; returns the exit code."""
    device = pick_device(config)
    join_process_group(config, device)
    try:
        alone = only_run_in(Path(config.output), patience(config))
        minutes = config.parallel.distributed_timeout_minutes
        with quiet(), on_device(device), watched(minutes), alone:
            trainer = prepare(config, shape, device)
            signal.signal(signal.SIGTERM, trainer.stop_soon)
            complete = trainer.train()
            if trainer.log is not None:
                summarize(config, trainer.log, complete)
    except (RankLost, CheckpointNotWritten, SeenByOneRank) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # ending the groups would wait for a missing rank
    except ALIKE:
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()
    return 0


def prepare(config: Config, shape: RunShape, device: torch.device) -> Trainer:
    """Groups, model, optimizer, data, and the checkpoint to continue from."""
    from ulysses_mc.layers import adam_in_use, norms_in_use
    from ulysses_mc.parallel_state import initialize_model_parallel

    from . import checkpoint, random_state, self_check
    from .data import build_datasets
    from .flops import CONVENTION
    from .model import build_model, build_optimizer, number_of_parameters
    from .trainer import Trainer

    begun, saved = Progress(), None
    if (path := checkpoint.find(config)) is not None:
        # Before minutes are spent on building a model.
        saved = path, checkpoint.check_run(path, config, shape)
        begun = checkpoint.progress_of(saved[1])
    state = initialize_model_parallel(config.parallel, use_megatron=True)
    random_state.seed(config.training.seed)
    model = build_model(config, shape, state, device)
    optimizer = build_optimizer(config, model)
    datasets, train_iters = _datasets(config, shape, begun, build_datasets)
    trainer = Trainer(config, shape, state, device, model, optimizer, datasets, train_iters)
    parameters = number_of_parameters(model)
    left = (train_iters - begun.iteration) * shape.global_batch_size
    trainer.say(
        f"{config.model.kind} model with {parameters:,} parameters in {config.training.precision} "
        f"on {device.type} x {dist.get_world_size()}\n{shape.describe()}\n"
        f"{train_iters} iterations, {begun.consumed_samples + left} samples\n"
        f"norm: {'; '.join(norms_in_use(model)) or 'that of the layer spec'}\n"
        f"optimizer: {adam_in_use()}\n"
        f"TFLOP/s and MFU: {CONVENTION}"
    )
    if config.evaluation.interval and datasets[1] is None:
        trainer.say(f"no evaluation: data.split {config.data.split!r} leaves no validation data")
    trainer.resume(saved)
    if config.training.self_check:
        self_check.ranks_agree(config, datasets[0], trainer.progress.consumed_samples)
        self_check.attention_reaches_all_ranks(trainer)
    return trainer


def _datasets(
    config: Config, shape: RunShape, begun: Progress, build: Any
) -> tuple[tuple[Any, Any], int]:
    """Datasets, and the number of iterations: as configured, or one pass over the data.

    What was `begun` may have been with other batches, so samples are counted, not iterations.
    """
    batch, wanted = shape.global_batch_size, config.training.train_iters
    samples = wanted and begun.consumed_samples + max(wanted - begun.iteration, 0) * batch
    train, valid = build(config, config.model.seq_length, samples, None)
    if train is None:
        raise UserError(f"data.split {config.data.split!r} leaves no training data")
    left = max(len(train) - begun.consumed_samples, 0)
    iterations = wanted or begun.iteration + left // batch
    if iterations < 1:
        raise UserError(
            f"the training data holds {len(train)} samples of {config.model.seq_length} tokens, "
            f"less than one global batch of {batch}"
        )
    length = config.evaluation.seq_length
    if length and length != config.model.seq_length:
        _, valid = build(config, length, 1, None)
    return (train, valid), iterations


def patience(config: Config) -> float:
    """Seconds to wait for another run in the output: where torchrun may have started this one
    again, ranks of the attempt before may live until their timeout, on a node that was cut off.
    Nodes do not count attempts alike."""
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    several_nodes = os.environ.get("GROUP_WORLD_SIZE", "1") != "1"
    return 60 * config.parallel.distributed_timeout_minutes if again or several_nodes else 0


def pick_device(config: Config) -> torch.device:
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    available = torch.cuda.device_count() if config.device != "cpu" else 0
    if config.device == "cuda" and not available:
        raise UserError("device cuda: PyTorch finds no GPU")
    if not available:
        return torch.device("cpu")
    if local_rank >= available:
        raise UserError(
            f"{os.environ.get('LOCAL_WORLD_SIZE', 1)} ranks on this node, {available} GPUs: "
            "start one rank per GPU, or set device cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def join_process_group(config: Config, device: torch.device) -> None:
    """torchrun's world, or a world of one rank when started without it."""
    options: dict[str, Any] = {
        "backend": "nccl" if device.type == "cuda" else "gloo",
        "timeout": timedelta(minutes=config.parallel.distributed_timeout_minutes),
    }
    if device.type == "cuda":
        options["device_id"] = device
    if "RANK" not in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} and RANK is not set: start with torchrun, "
            "or with neither of them for one rank"
        )
    if "RANK" not in os.environ:
        options.update(store=dist.HashStore(), rank=0, world_size=1)
    elif os.environ.get("GROUP_WORLD_SIZE") == "1":
        # torchrun starts ranks again around a store that still holds the last attempt's addresses
        # (unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE is 1, as pretrain_gpt.sh sets it: nodes do
        # not count attempts alike).
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store, rank, world_size = next(dist.rendezvous("env://", timeout=options["timeout"]))
        store = dist.PrefixStore(f"attempt_{attempt}", store)
        options.update(store=store, rank=rank, world_size=world_size)
    dist.init_process_group(**options)


@contextlib.contextmanager
def on_device(device: torch.device) -> Any:
    """Megatron as it is on GPUs; on CPUs, what it takes from CUDA put in its place."""
    if device.type == "cuda":
        yield
        return
    from ulysses_mc import megatron_on_cpu

    with megatron_on_cpu():
        yield


@contextlib.contextmanager
def quiet() -> Any:
    """Leaves out Megatron's remarks on packages that are not installed, and its own logging."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("megatron").setLevel(logging.ERROR)
        yield


def summarize(config: Config, log: Any, complete: bool) -> None:
    """What was done and where it lies."""
    entropy = unigram_entropy(open_checked(data_prefixes(config)[0]).tokens)
    losses = [r["lm_loss"] for r in log.records() if r["kind"] == "train"]
    if not losses:
        print("nothing left to train: raise training.train_iters, or name another output")
        return
    last = sum(losses[-5:]) / len(losses[-5:])
    relation = "below" if last < entropy else "not yet below"
    print(
        f"\n{'done' if complete else 'stopped by SIGTERM'}: loss {losses[0]:.3f} -> {last:.3f} "
        f"(mean of the last {len(losses[-5:])}), {relation} {entropy:.3f}, the entropy of the "
        "token frequencies:\nwhat a model reaches that knows how often each token occurs and "
        "nothing about its context."
    )
    folder = Path(config.output)
    if (folder / "checkpoints" / LATEST).is_file():
        print(f"  checkpoint   {newest(folder / 'checkpoints')}")
    print(f"  log          {log.path}")
    if log.writer is not None:
        print(f"  tensorboard  {folder / 'tensorboard'}")
    # Not after SIGTERM: who sends it may not wait for matplotlib.
    if complete and config.logging.plot and (plot := log.plot(entropy)) is not None:
        print(f"  loss plot    {plot}")
    log.close()
