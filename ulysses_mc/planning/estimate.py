"""All that the planner says about one setting."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .hardware import GIB
from .job import Job, Setting, head_layout
from .memory import Memory, memory
from .rules import head_note
from .timing import StepTime, mfu, step_time
from .traffic import bytes_per_step, flows


@dataclass(frozen=True)
class Estimate:
    """One setting of a job, with its memory and time."""

    job: Job
    setting: Setting
    memory: Memory
    time: StepTime

    @classmethod
    def of(cls, job: Job, setting: Setting, used: Memory | None = None) -> Estimate:
        """`used`: its memory, where that is known already."""
        return cls(job, setting, used or memory(job, setting), step_time(job, setting))

    @property
    def seconds(self) -> float:
        return self.time.total

    @property
    def tokens_per_second(self) -> float:
        """Of the whole job."""
        return self.job.tokens_per_step / self.seconds

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_second / self.job.num_gpus

    @property
    def mfu(self) -> float:
        return mfu(self.job, self.seconds)

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.job.gpu.memory

    @property
    def micro_batches(self) -> int:
        return self.setting.num_micro_batches(self.job.global_batch_size)

    @cached_property
    def heads(self) -> str:
        """The head layout, for people."""
        layout = head_layout(self.job.model, self.setting.tp, self.setting.ulysses)
        if isinstance(layout, Exception):
            return str(layout)
        if self.setting.ulysses == 1:
            kv = layout.local_kv_heads
            return f"{layout.local_heads} query, {kv} KV head{'s' * (kv > 1)} per rank"
        sizes = [len(run) for run in layout.query_heads]
        shown = f"{sizes[0]} query head{'s' * (sizes[0] > 1)} on each of {len(sizes)} ranks"
        if len(set(sizes)) > 1:
            shown = f"query heads {','.join(map(str, sizes[:16]))}{',...' * (len(sizes) > 16)}"
            shown += f", {layout.imbalance:.0%} imbalance"
        copies = f", {layout.kv_copies} KV copies of {layout.local_kv_heads}"
        return f"{layout.kind}: {shown}" + copies * (layout.kv_copies > layout.local_kv_heads)

    @cached_property
    def notes(self) -> list[str]:
        """What a person should know about this setting."""
        notes = [head_note(self.job, self.setting)]
        node = self.job.gpu.gpus_per_node
        for flow in flows(self.job, self.setting):
            if flow.kind == "tp" and flow.spans_nodes:
                notes.append(
                    f"tp {flow.group} crosses the node of {node}: every layer waits for it"
                )
            if flow.kind == "ulysses" and flow.spans_nodes:
                notes.append(
                    f"ulysses {flow.group} x tp {self.setting.tp} crosses the node of {node}: "
                    f"{flow.outside:.0%} of its bytes take the slower link"
                )
        return [note for note in notes if note]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: bytes, seconds, and the layout."""
        s, layout = self.setting, head_layout(self.job.model, self.setting.tp, self.setting.ulysses)
        heads: dict[str, Any] = {"description": self.heads}
        if not isinstance(layout, Exception):
            heads |= {
                "kind": layout.kind,
                "imbalance": layout.imbalance,
                "query_heads": [len(run) for run in layout.query_heads],
                "kv_heads": [len(run) for run in layout.kv_heads],
            }
        return {
            "setting": {
                "tensor_model_parallel_size": s.tp, "ulysses_parallel_size": s.ulysses,
                "ring_parallel_size": s.ring, "pipeline_model_parallel_size": s.pp,
                "virtual_pipeline_model_parallel_size": s.vpp, "data_parallel_size": s.dp,
                "expert_model_parallel_size": s.ep, "micro_batch_size": s.micro_batch,
                "recompute": s.recompute,
            },
            "memory_bytes": {**self.memory.parts(), "total": self.memory.total},
            "memory_gib": self.memory.total / GIB,
            "fits": self.fits,
            "bytes_per_step": bytes_per_step(self.job, s),
            "step_seconds": {**self.time.parts(), "total": self.seconds},
            "micro_batches": self.micro_batches,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
            "mfu": self.mfu,
            "heads": heads,
            "notes": self.notes,
        }  # fmt: skip
