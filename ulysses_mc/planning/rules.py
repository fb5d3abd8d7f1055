"""Whether a setting can run at all: one line that says why not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import lcm
from typing import Any

from .job import Job, Setting, head_layout
from .memory import stage_layers
from .model import ModelShape
from .problems import either, near
from .who_runs import ring_and_heads


@dataclass(frozen=True)
class Reason:
    """Why a setting is out: a word to count by, and the arithmetic in one line."""

    kind: str
    line: str


def token_multiple(job: Job, setting: Setting) -> int:
    """The sequence length is a multiple of this: zigzag cuts 2 chunks for each cp rank."""
    tensor = setting.tp if job.tp_sequence_sharding else 1
    return setting.cp * lcm(2, tensor) if setting.cp > 1 else tensor


def broken_rule(job: Job, setting: Setting) -> Reason | None:
    """The first rule that the setting breaks, memory aside."""
    for rule in _RULES:
        if reason := rule(job, setting):
            return reason
    return None


def broken_by_variant(job: Job, setting: Setting) -> bool:
    """Whether micro-batch or chunks break a rule, of a layout that breaks none itself."""
    return bool(_layers(job, setting) or _batch(job, setting))


def broken_rules(job: Job, setting: Setting) -> list[Reason]:
    """Every rule that the setting breaks, memory aside."""
    return [reason for rule in _RULES if (reason := rule(job, setting))]


_FIELDS = {"heads": ("tp", "ulysses"), "tp": ("tp",), "layers": ("pp", "vpp"),
           "batch": ("micro_batch",), "experts": ("ep",)}  # fmt: skip


def nearest_settings(job: Job, setting: Setting, kind: str) -> str:
    """The nearest values of the fields behind a reason, one changed at a time, without it."""
    options = []

    def works(name: str, value: int) -> bool:
        return all(r.kind != kind for r in broken_rules(job, _changed(setting, name, value)))

    for name in _FIELDS.get(kind, ()):
        now = getattr(setting, name)
        found = near(now, 4 * now, partial(works, name))
        if found:
            options.append(f"{name} {either(found)}")
    if kind == "batch":
        unit = setting.micro_batch * setting.dp * (setting.pp if setting.vpp > 1 else 1)
        options.append(f"global batch {either(_multiples(job.global_batch_size, unit))}")
    if kind == "sequence":
        unit = token_multiple(job, setting)
        options.append(f"seq_length {either(_multiples(job.seq_length, unit))}")
    return "; ".join(options)


def _changed(setting: Setting, name: str, value: int) -> Setting:
    changes: dict[str, Any] = {name: value}
    return replace(setting, **changes)


def _multiples(value: int, unit: int) -> list[int]:
    return [n for n in (value // unit * unit, (value // unit + 1) * unit) if n]


def head_note(job: Job, setting: Setting) -> str:
    """The head layout in one line: 'replicated', 'uneven', or ''."""
    layout = head_layout(job.model, setting.tp, setting.ulysses)
    if isinstance(layout, Exception):
        return str(layout).splitlines()[0]
    kv, tp, ulysses = job.model.num_query_groups, setting.tp, setting.ulysses
    per_rank = f"{kv} KV heads / tp {tp} = {layout.local_kv_heads} per rank"
    if layout.kind == "uneven":
        return (
            f"{layout.local_heads} query heads / ulysses {ulysses}: uneven, "
            f"{layout.imbalance:.0%} imbalance"
        )
    copies = layout.kv_copies * tp // kv
    if copies > 1:
        return (
            f"{per_rank}: replicated {copies}x over ulysses {ulysses}"
            if ulysses > 1
            else (f"{per_rank}: replicated {copies}x over tp")
        )
    return ""


def _heads(job: Job, setting: Setting) -> Reason | None:
    model, tp, ulysses = job.model, setting.tp, setting.ulysses
    heads, kv = model.num_attention_heads, model.num_query_groups
    if heads % tp:
        return Reason("heads", f"{heads} query heads / tp {tp} = {heads / tp:.3g}: not whole")
    if kv % tp and tp % kv:
        return Reason("heads", f"{kv} KV heads and tp {tp}: neither divides the other")
    local = heads // tp
    if ulysses > local:
        split = max(n for n in range(1, local + 1) if ulysses % n == 0 and _even(model, tp, n))
        return Reason(
            "heads",
            f"{heads} query heads / tp {tp} = {local} per rank, fewer than ulysses {ulysses}: "
            f"ulysses {split} x ring {setting.cp // split} instead",
        )
    layout = head_layout(model, tp, ulysses)
    if isinstance(layout, Exception):
        return Reason("heads", str(layout).splitlines()[0])
    if layout.kind == "uneven" and not job.uneven_heads:
        return Reason("heads", head_note(job, setting))
    why = ring_and_heads(model, setting)
    return Reason("heads", why) if why else None


def _even(model: ModelShape, tp: int, ulysses: int) -> bool:
    return getattr(head_layout(model, tp, ulysses), "kind", "") == "even"


def _matrices(job: Job, setting: Setting) -> Reason | None:
    for name, size in (("hidden size", job.model.hidden_size), ("MLP", job.model.ffn_hidden_size)):
        if size % setting.tp:
            return Reason("tp", f"{name} {size} / tp {setting.tp} = {size / setting.tp:.4g}")
    return None


def _layers(job: Job, setting: Setting) -> Reason | None:
    layers, stages = job.model.num_layers, setting.pp * setting.vpp
    if stages > layers or stage_layers(job.model, setting) is None:
        chunks = f" x vpp {setting.vpp}" if setting.vpp > 1 else ""
        return Reason(
            "layers",
            f"{layers} layers (or {layers + 2} with embedding and loss) / pp {setting.pp}{chunks}"
            f" = {layers / stages:.3g}: not whole",
        )
    return None


def _batch(job: Job, setting: Setting) -> Reason | None:
    unit, total = setting.micro_batch * setting.dp, job.global_batch_size
    if total % unit:
        micro = f" x micro-batch {setting.micro_batch}" if setting.micro_batch > 1 else ""
        what = "less than one sample each" if total < unit else "not whole"
        return Reason("batch", f"global batch {total} / dp {setting.dp}{micro}: {what}")
    count = total // unit
    if setting.vpp > 1 and count % setting.pp:
        return Reason(
            "batch", f"{count} micro-batches / pp {setting.pp} with vpp {setting.vpp}: not whole"
        )
    return None


def _sequence(job: Job, setting: Setting) -> Reason | None:
    unit = token_multiple(job, setting)
    if job.seq_length % unit:
        what = f"cp {setting.cp}" + (f" x lcm(2, tp {setting.tp})" if setting.cp > 1 else "")
        above = -(-job.seq_length // unit) * unit
        return Reason(
            "sequence",
            f"{job.seq_length} tokens / {unit} ({what}): not whole; pad to {above}",
        )
    return None


def _experts(job: Job, setting: Setting) -> Reason | None:
    if setting.ep == 1 or not job.model.moe:
        return None
    experts, ranks = job.model.moe.num_experts, setting.tp * setting.cp * setting.dp
    if experts % setting.ep:
        return Reason("experts", f"{experts} experts / ep {setting.ep}: not whole")
    if ranks % setting.ep:
        return Reason("experts", f"{ranks} ranks of a stage / ep {setting.ep}: not whole")
    return None


_RULES = (_heads, _matrices, _layers, _batch, _sequence, _experts)
