"""The training loop: Megatron's schedules, optimizer and checkpoints, and what goes around them."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from ulysses_mc.loss import masked_sum
from ulysses_mc.parallel_state import ParallelState

from . import checkpoint, nonfinite
from .checkpoint import Progress
from .config import Config
from .data import Batches, samples_read
from .log import RunLog
from .measure import measure
from .model import build_scheduler
from .preflight import RunShape, accumulation_steps, describe_data
from .shard import local_part

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class StepResult:
    """Of one step, equal on all ranks."""

    loss: float
    tokens: int
    ranks_told_to_stop: int


class Trainer:
    """Everything a run holds. Build it on every rank, then `resume()` and `train()`."""

    def __init__(
        self,
        config: Config,
        shape: RunShape,
        state: ParallelState,
        device: torch.device,
        model: list[Any],
        optimizer: Any,
        datasets: tuple[Any, Any],
        train_iters: int,
    ) -> None:
        self.config, self.shape, self.state, self.device = config, shape, state, device
        self.model, self.optimizer, self.train_iters = model, optimizer, train_iters
        self.model_config = get_model_config(model[0])
        self.scheduler = build_scheduler(config, optimizer, train_iters)
        self.train_data, self.valid_data = datasets
        self.progress = Progress()
        self.saved_at: int | None = None
        self.log: RunLog | None = None
        self.stop_requested = False
        self._connect()

    def _connect(self) -> None:
        """The hooks through which Megatron's schedules call DDP and the optimizer."""
        megatron = self.model_config
        megatron.finalize_model_grads_func = finalize_model_grads
        megatron.grad_scale_func = self.optimizer.scale_loss
        if self.config.optimizer.overlap_grad_reduce:
            hooks = [chunk.no_sync for chunk in self.model]
            megatron.no_sync_func = hooks if len(hooks) > 1 else hooks[0]

    def stop_soon(self, *_: object) -> None:
        """Lets all ranks end after this step, with a checkpoint; a handler for SIGTERM."""
        self.stop_requested = True

    # --- one step -------------------------------------------------------------------------

    def run_batches(
        self, batches: list[Iterator[Batch]], steps: int, micro: int, length: int, *, train: bool
    ) -> StepResult:
        """Runs `steps` micro-batches of `micro` samples of `length` tokens through the pipeline."""
        if self.config.data.isolate_documents:  # which stand in one row
            micro, length = 1, micro * length
        reports = get_forward_backward_func()(
            forward_step_func=self.forward_step,
            data_iterator=batches if len(batches) > 1 else batches[0],
            model=self.model,
            num_microbatches=steps,
            seq_length=length,
            micro_batch_size=micro,
            decoder_seq_length=length,
            forward_only=not train,
        )
        return self.total([r["lm loss"] for r in reports])

    def forward_step(self, batches: Iterator[Batch], chunk: Any) -> tuple[torch.Tensor, Any]:
        batch, documents = local_part(next(batches), self.state, self.device)
        output = chunk(
            batch["tokens"],
            batch["position_ids"],
            None,
            labels=batch["labels"],
            packed_seq_params=documents,
        )  # last stage: loss of each token, [b, s/P]
        return output, partial(sum_of_losses, batch["loss_mask"])

    def source(self, dataset: Any, length: int) -> Batches:
        """The micro-batches of this rank, of samples padded to `length`."""
        shape, isolate = self.shape, self.config.data.isolate_documents
        return Batches(
            dataset,
            length,
            self.state.rank("dp"),
            shape.data_parallel_size,
            shape.vocab_size,
            describe_data(self.config).eod if isolate else None,
        )

    def total(self, reports: list[torch.Tensor]) -> StepResult:
        """Sum of losses over sum of tokens, over micro-batches, data and Ulysses ranks.

        One all-reduce over all ranks: tensor-parallel peers and earlier stages add zero. It also
        tells every rank how many ranks were asked to stop.
        """
        values = torch.zeros(3, dtype=torch.float64, device=self.device)
        if reports and self.state.rank("tp") == 0:
            values[:2] = torch.stack(reports).double().sum(0)
        values[2] = float(self.stop_requested)
        dist.all_reduce(values)
        loss, tokens, stop = values.tolist()
        return StepResult(loss / tokens if tokens else 0.0, int(tokens), int(stop))

    def train_step(self) -> tuple[StepResult, float, bool]:
        """One step: (result, gradient norm, whether the optimizer skipped it)."""
        shape, batch = self.shape, self.config.batch
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        result = self.run_batches(
            self.next_batches(),
            shape.accumulation_steps,
            batch.micro_batch_size,
            shape.padded_seq_length,
            train=True,
        )
        if not math.isfinite(result.loss):
            nonfinite.stop(self, f"the loss is {result.loss}", gradients=False)
        updated, grad_norm, _ = self.optimizer.step()
        if not math.isfinite(float(grad_norm)):
            nonfinite.stop(self, f"the gradient norm is {float(grad_norm)}", gradients=True)
        if updated:
            self.scheduler.step(increment=shape.global_batch_size)
        self.progress = Progress(
            self.progress.iteration + 1, self.progress.consumed_samples + shape.global_batch_size
        )
        return result, float(grad_norm), not updated

    def next_batches(self) -> list[Iterator[Batch]]:
        """Of the next step; one iterator per model chunk: in an interleaved pipeline each asks for
        every batch."""
        source = self.source(self.train_data, self.shape.padded_seq_length)
        micro = self.config.batch.micro_batch_size
        return [
            source.step(self.progress.consumed_samples, self.shape.accumulation_steps, micro)
            for _ in self.model
        ]

    def evaluate(self) -> None:
        """The loss over the same validation samples each time, without changing anything."""
        options, shape = self.config.evaluation, self.shape
        micro = options.micro_batch_size or self.config.batch.micro_batch_size
        total = options.global_batch_size or self.config.batch.global_batch_size
        steps = accumulation_steps(shape.grid, micro, total, "evaluation")
        length = options.seq_length or self.config.model.seq_length
        length = -(-length // shape.token_multiple) * shape.token_multiple
        source = self.source(self.valid_data, length)
        loss, tokens = 0.0, 0
        with self.evaluating():
            for step in range(min(options.iters, -(-len(self.valid_data) // total))):
                batches = [source.step(step * total, steps, micro) for _ in self.model]
                result = self.run_batches(batches, steps, micro, length, train=False)
                loss, tokens = loss + result.loss * result.tokens, tokens + result.tokens
        if not math.isfinite(loss):
            nonfinite.check_parameters(self)
            raise FloatingPointError(
                f"the validation loss is {loss} after iteration {self.progress.iteration}"
            )
        if self.log is not None and tokens:
            self.log.evaluation(self.progress.iteration, loss / tokens, tokens)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Without dropout and gradients."""
        with self.parameters_gathered(), torch.no_grad():
            for chunk in self.model:
                chunk.eval()
            yield
            for chunk in self.model:
                chunk.train()

    @contextlib.contextmanager
    def parameters_gathered(self) -> Iterator[None]:
        """With overlap_param_gather a step leaves parameters to be gathered in the next forward
        pass; here all of them are up to date."""
        overlapped = self.config.optimizer.overlap_param_gather
        if overlapped:
            for chunk in self.model:
                chunk.disable_forward_pre_hook(param_sync=True)
        yield
        if overlapped:
            for chunk in self.model:
                chunk.enable_forward_pre_hook()

    # --- the loop -------------------------------------------------------------------------

    def resume(self, saved: tuple[Path, dict[str, Any]] | None) -> None:
        """Loads a checkpoint, if there is one, of which `check_run` gave the second."""
        if saved is not None:
            path, run = saved
            self.progress = checkpoint.load(
                path, run, self.config, self.model, self.optimizer, self.scheduler
            )
            self.saved_at = self.progress.iteration
            self.say(
                f"loaded {path}: continuing after iteration {self.progress.iteration}, "
                f"{self.progress.consumed_samples} samples consumed"
            )
            self.warn_of_changes(run)
        if dist.get_rank() == 0:
            self.log = RunLog(self.config, self.train_iters, self.progress.iteration)

    def warn_of_changes(self, run: dict[str, Any]) -> None:
        """What may differ from the run that saved, but is seldom meant to."""
        here = self.config.training.precision
        if run["precision"] != here:
            self.say(f"warning: saved in {run['precision']}, goes on in {here}")
        read = samples_read(self.train_data, self.progress.consumed_samples)
        if run.get("samples_read") not in (read, None):
            self.say(
                "warning: the samples come in another order than in the run that saved: some of "
                "those it has read come again, others never. The order follows from the data, "
                "data.split, training.seed, model.seq_length, and training.train_iters x "
                "batch.global_batch_size where that makes more epochs"
            )

    def train(self) -> bool:
        """Trains to train_iters or SIGTERM; True if it got to the end."""
        config = self.config
        skipped, clock = 0, time.perf_counter()
        while self.progress.iteration < self.train_iters:
            result, grad_norm, skip = self.train_step()
            skipped += skip
            iteration = self.progress.iteration
            if iteration % config.logging.interval == 0 or iteration == self.train_iters:
                now = time.perf_counter()
                seconds = (now - clock) / config.logging.interval
                self.report(result, grad_norm, skipped, seconds)
                skipped, clock = 0, now
            if result.ranks_told_to_stop:
                # Every rank has just taken part in an all-reduce, so every rank lives and knows.
                self.say(f"SIGTERM after iteration {iteration}")
                self.save()
                return False
            pause = time.perf_counter()
            if config.checkpoint.interval and iteration % config.checkpoint.interval == 0:
                self.save()
            if self.evaluation_is_due():
                self.evaluate()
            clock += time.perf_counter() - pause
        if config.checkpoint.interval:
            self.save()
        return True

    def evaluation_is_due(self) -> bool:
        interval, iteration = self.config.evaluation.interval, self.progress.iteration
        if self.valid_data is None or not interval:
            return False
        return iteration % interval == 0 or iteration == self.train_iters

    def save(self) -> None:
        if self.saved_at == self.progress.iteration:
            return
        with self.parameters_gathered():
            nonfinite.check_parameters(self)
            path = checkpoint.save(
                self.config,
                self.shape,
                self.progress,
                self.model,
                self.optimizer,
                self.scheduler,
                samples_read(self.train_data, self.progress.consumed_samples),
            )
        self.saved_at = self.progress.iteration
        self.say(f"saved {path}")

    def report(self, result: StepResult, grad_norm: float, skipped: int, seconds: float) -> None:
        record = measure(self, result, grad_norm, skipped, seconds)
        if self.log is not None:
            self.log.training(record)

    def say(self, text: str) -> None:
        if dist.get_rank() == 0:
            print(text, flush=True)


def sum_of_losses(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """(sum over this rank's tokens, their number, both for the log): Megatron's 3-tuple.

    Args:
        loss_mask: [b, s/P], 0 or 1.
        losses: [b, s/P], cross entropy of each token in nats.
    """
    total, count = masked_sum(losses.float(), loss_mask)
    return total, count.to(torch.int), {"lm loss": torch.stack([total.detach(), count])}
