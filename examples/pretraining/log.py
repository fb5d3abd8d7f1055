"""What a run tells: Megatron's log line, one JSON object per line, tensorboard, a loss plot.

Everything here runs on rank 0 alone.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from .config import Config


@dataclass(frozen=True)
class Record:
    """One logged iteration. `mfu` is a fraction; times in ms, memory in GiB."""

    iteration: int
    consumed_samples: int
    elapsed_ms: float
    tflops_per_gpu: float | None
    learning_rate: float
    global_batch_size: int
    lm_loss: float
    loss_scale: float
    grad_norm: float
    skipped_iterations: int
    nan_iterations: int
    tokens_per_second_per_gpu: float
    mfu: float | None
    peak_memory_gib: float
    eta_seconds: float


def line(record: Record, train_iters: int) -> str:
    """The fields of Megatron-LM's training log under their names and in their order, then ours."""
    r = record
    tflops = "n/a" if r.tflops_per_gpu is None else f"{r.tflops_per_gpu:.3g}"
    fields = [
        f"iteration {r.iteration:8d}/{train_iters:8d}",
        f"consumed samples: {r.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {r.elapsed_ms:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {tflops}",
        f"learning rate: {r.learning_rate:.6E}",
        f"global batch size: {r.global_batch_size:5d}",
        f"lm loss: {r.lm_loss:.6E}",
        f"loss scale: {r.loss_scale:.1f}",
        f"grad norm: {r.grad_norm:.3f}",
        f"number of skipped iterations: {r.skipped_iterations:3d}",
        f"number of nan iterations: {r.nan_iterations:3d}",
        f"tokens/s/GPU: {r.tokens_per_second_per_gpu:.1f}",
        f"MFU: {'n/a' if r.mfu is None else f'{r.mfu:.1%}'}",
        f"peak memory (GiB): {r.peak_memory_gib:.2f}",
        f"ETA: {timedelta(seconds=round(r.eta_seconds))}",
    ]
    return f" [{datetime.now():%Y-%m-%d %H:%M:%S}] " + " | ".join(fields) + " |"


def _record(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
        complete = isinstance(value["iteration"], int) and isinstance(value["kind"], str)
        return value if complete and isinstance(value["lm_loss"], float) else None
    except (ValueError, TypeError, KeyError):
        return None


class RunLog:
    """OUTPUT/log.jsonl, OUTPUT/tensorboard/, OUTPUT/loss.png.

    Args:
        config: of the run.
        iteration: where the run starts; later lines of an earlier attempt are dropped, so that
            the log of a resumed run has each iteration once.
    """

    def __init__(self, config: Config, train_iters: int, iteration: int) -> None:
        self.train_iters = train_iters
        self.folder = Path(config.output)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / "log.jsonl"
        kept = [r for r in self.records() if r["iteration"] <= iteration] if iteration else []
        whole = self.folder / ".log.jsonl.new"
        whole.write_text("".join(json.dumps(r) + "\n" for r in kept))
        whole.replace(self.path)
        self.writer: Any = None
        if config.logging.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(
                str(self.folder / "tensorboard"), purge_step=iteration + 1, flush_secs=30
            )

    def records(self) -> list[dict[str, Any]]:
        """All lines but those that are no record: a killed run may have left half of one."""
        if not self.path.is_file():
            return []
        lines = self.path.read_text(errors="replace").splitlines()
        return [record for text in lines if (record := _record(text)) is not None]

    def training(self, record: Record) -> None:
        print(line(record, self.train_iters), flush=True)
        values = dataclasses.asdict(record)
        self._append({"kind": "train", **values})
        if self.writer is not None:
            names = {
                "lm_loss": "lm loss",
                "learning_rate": "learning-rate",
                "grad_norm": "grad-norm",
            }
            for key, value in values.items():
                if isinstance(value, float):
                    self.writer.add_scalar(names.get(key, key), value, record.iteration)

    def evaluation(self, iteration: int, loss: float, tokens: int) -> None:
        print(
            f" validation loss at iteration {iteration} | lm loss value: {loss:.6E} | "
            f"over {tokens} tokens",
            flush=True,
        )
        self._append({"kind": "valid", "iteration": iteration, "lm_loss": loss, "tokens": tokens})
        if self.writer is not None:
            self.writer.add_scalar("lm loss validation", loss, iteration)

    def _append(self, value: dict[str, Any]) -> None:
        with self.path.open("a") as stream:
            stream.write(json.dumps(value) + "\n")

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()

    def plot(self, entropy: float | None) -> Path | None:
        """Draws the losses so far into loss.png; None if there are none."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        records = self.records()
        if not any(r["kind"] == "train" for r in records):
            return None
        figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
        for kind, style in (("train", "-"), ("valid", "o")):
            points = [(r["iteration"], r["lm_loss"]) for r in records if r["kind"] == kind]
            if points:
                label = {"train": "training", "valid": "validation"}[kind]
                axes.plot(*zip(*points, strict=True), style, label=label)
        if entropy is not None:
            axes.axhline(entropy, ls="--", color="gray", label="entropy of the token frequencies")
        axes.set(xlabel="iteration", ylabel="loss (nats per token)")
        axes.legend()
        axes.grid(alpha=0.3)
        path = self.folder / "loss.png"
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
        return path
