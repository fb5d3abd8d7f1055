"""What neither this package nor stock Megatron can run, though it could be planned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .job import Setting, head_layout
from .model import ModelShape
from .problems import Problem

if TYPE_CHECKING:
    from .run import Run

OURS, STOCK = "ulysses_mc", "megatron"


def ring_and_heads(model: ModelShape, setting: Setting) -> str:
    """Why nobody runs these heads with ring; '' if Megatron does.

    TransformerEngine's a2a+p2p wants query and key/value heads that the all-to-all divides (its
    AttnFuncWithCPAndKVP2P asserts it), and this package has no ring.
    """
    kind = getattr(head_layout(model, setting.tp, setting.ulysses), "kind", "even")
    if setting.ring == 1 or kind == "even":
        return ""
    return (
        f"{kind} heads over ulysses {setting.ulysses} with ring {setting.ring}: Megatron's "
        "a2a+p2p refuses them, and this package has no ring"
    )


def cannot_run(run: Run) -> list[Problem]:
    """What the layers of the run would refuse, one rule apart from its arithmetic."""
    problems = []
    if run.runs_on == OURS and run.ring > 1:
        problems.append(
            Problem(
                f"ring {run.ring} with this package's layers",
                "ring attention is not there yet: they refuse ring_parallel_size > 1",
                f"ulysses {run.ulysses * run.ring} x ring 1",
            )
        )
    kind = getattr(head_layout(run.model, run.tp, run.ulysses), "kind", "even")
    enough = run.ulysses * run.tp <= run.model.num_attention_heads  # else told as a rule of heads
    if run.runs_on == STOCK and run.ring == 1 and kind != "even" and enough:
        from .megatron_write import our_spec

        name = our_spec(run.model)
        problems.append(
            Problem(
                f"{run.model.num_attention_heads} query and {run.model.num_query_groups} KV heads "
                f"/ tp {run.tp} over --cp-comm-type a2a {run.ulysses}: {kind}",
                "Megatron's own a2a wants as many heads on each rank",
                f"--spec ulysses_mc.layers.specs {name}" if name else "layers by with_ulysses",
            )
        )
    if run.mamba and run.ulysses > 1:
        problems.append(
            Problem(
                f"Mamba layers (M) with ulysses {run.ulysses}",
                "they need the whole sequence: layers refuse them",
                "ulysses 1; or a pattern of * and -",
            )
        )
    return problems
