"""What the facts mean: which backends are usable, what is run or skipped, what goes badly together.

Pure functions of `Facts`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .probes import Facts

OLDEST = {"torch": "2.6", "megatron-core": "0.16.1", "transformer-engine": "2.9",
          "flash-attn": "2.7", "deepspeed": "0.17"}  # fmt: skip


@dataclass(frozen=True)
class Backend:
    """Something that can do a part of the work here, or why it cannot."""

    part: str
    name: str
    usable: bool
    why: str


def version(text: str) -> tuple[int, ...]:
    """'2.13.0+cpu' -> (2, 13, 0)."""
    numbers = re.match(r"[0-9.]+", text)
    return tuple(int(n) for n in numbers[0].split(".") if n) if numbers else (0,)


def backends(facts: Facts) -> list[Backend]:
    """Every backend of the library, usable or not."""
    return [*_communication(facts), *_attention(facts), *_layers(facts)]


def _torch_trouble(facts: Facts) -> str:
    if "torch" not in facts.packages:
        return "torch is not installed: pip install torch"
    return f"torch does not import: {facts.torch['error']}" if "error" in facts.torch else ""


def _communication(facts: Facts) -> list[Backend]:
    trouble = _torch_trouble(facts)
    gloo = bool(facts.torch.get("gloo"))
    why = trouble or ("" if gloo else "this torch is built without it")
    found = [Backend("exchange", "gloo", gloo and not trouble, why or "CPU ranks")]
    if trouble:
        why = trouble
    elif not facts.torch.get("nccl"):
        why = "this torch is built without it"
    elif not facts.torch.get("cuda"):
        why = _no_cuda(facts)
    else:
        why = ""
    nccl = f"NCCL {facts.torch.get('nccl_version') or '?'}, {len(facts.gpus)} GPUs"
    return [*found, Backend("exchange", "nccl", not why, why or nccl)]


def _no_cuda(facts: Facts) -> str:
    if not facts.torch.get("cuda_build"):
        return "this torch is built for the CPU"
    if facts.driver:
        return (
            f"nvidia-smi sees GPUs, torch (CUDA {facts.torch['cuda_build']}) does not: the driver "
            "may be too old for it, or CUDA_VISIBLE_DEVICES hides them"
        )
    return "no GPU is visible"


def _attention(facts: Facts) -> list[Backend]:
    trouble, gpu = _torch_trouble(facts), bool(facts.torch.get("cuda"))
    where = "CPU and CUDA" if gpu else "CPU"
    found = [Backend("attention", "sdpa", not trouble, trouble or where)]
    why = trouble or ("" if gpu else "no GPU: its backward pass does not exist on the CPU")
    found.append(Backend("attention", "flex", not why, why or "CUDA"))
    if facts.flash:
        why = "" if gpu else "no GPU"
    elif "flash-attn" in facts.packages:
        why = "installed without its compiled extension"
    else:
        why = "not installed: pip install 'ulysses-mc[flash]' on a machine with CUDA"
    text = f"FlashAttention {', '.join(map(str, facts.flash))}; explain_backend() tells which"
    found.append(Backend("attention", "flash-attn", not why, why or text))
    return found


def _layers(facts: Facts) -> list[Backend]:
    megatron = facts.packages.get("megatron-core")
    why = "" if megatron else "not installed: pip install 'ulysses-mc[megatron]'"
    text = f"{megatron}, on the CPU through megatron_on_cpu" if not facts.gpus else str(megatron)
    found = [Backend("layers", "megatron-core", not why, why or text)]
    if facts.te.get("late"):
        why = "not known: its import did not end in time"
    elif facts.te.get("error"):
        why = f"does not import: {facts.te['error']}"
    elif not facts.te:
        why = "not installed: pip install 'ulysses-mc[te]' on a machine with CUDA"
    else:
        why = ""
    text = f"{facts.te.get('version')}" + ("" if facts.gpus else ", attention only: no GPU")
    found.append(Backend("layers", "transformer-engine", not why, why or text))
    if facts.nvidia_apex:
        why = ""
    elif "apex" in facts.packages:
        why = (
            "a package called apex is installed, without apex.optimizers.FusedAdam: it is not "
            "NVIDIA's; Megatron works without it"
        )
    else:
        why = "not installed; Megatron works without it (it is only built from source)"
    found.append(Backend("layers", "apex (NVIDIA's)", not why, why or "FusedAdam found"))
    speed = facts.packages.get("deepspeed")
    why = "" if speed else "not installed: pip install 'ulysses-mc[deepspeed]'"
    return [*found, Backend("engine", "deepspeed", not why, why or str(speed))]


def runs(facts: Facts) -> list[tuple[str, bool, str]]:
    """(what, whether it is run here, why not): tests by their marker, and the example."""
    gpus, megatron = len(facts.gpus), "megatron-core" in facts.packages
    trouble = _torch_trouble(facts)
    no_megatron = trouble or ("" if megatron else "megatron-core is not installed")
    no_gpu = trouble or ("" if gpus else "no GPU")
    train = "jsonargparse is not installed: pip install 'ulysses-mc[train]'"
    example = no_megatron or ("" if "jsonargparse" in facts.packages else train)
    return [
        ("planning: plan, explain", True, ""),
        ("tests on CPU ranks", not trouble, trouble),
        ("tests marked megatron", not no_megatron, no_megatron),
        ("tests marked gpu", not no_gpu, no_gpu),
        ("examples/pretrain_gpt.py", not example, example),
        ("bench over gloo", not trouble, trouble),
        ("bench over NCCL", not no_gpu, no_gpu),
    ]


def bad_combinations(facts: Facts) -> list[str]:
    """What is known to go badly together, one line each with what to do."""
    found = [*_versions(facts), *_environment(facts)]
    if facts.torch.get("late"):
        found.append(
            "torch's import did not end in time (an overloaded machine, or a slow disk): what "
            "is said of its backends is by its files"
        )
    if facts.driver_late:
        found.append("nvidia-smi did not answer in time: GPUs and links are as torch sees them")
    if facts.packages.get("apex") and not facts.nvidia_apex:
        found.append(
            "the installed apex is an unrelated package of the same name: Megatron may try to "
            "import it; pip uninstall apex"
        )
    if "megatron-core" in facts.packages and "psutil" not in facts.packages:
        found.append("Megatron's checkpoint writer needs psutil: pip install psutil")
    known = "error" not in facts.torch and "late" not in facts.torch
    if facts.driver and facts.torch and known and not facts.torch.get("cuda"):
        found.append(_no_cuda(facts))
    if facts.te.get("error") and "torch" in facts.packages:
        found.append(
            "transformer-engine is built for one torch: with another its import fails "
            f"({facts.te['error'][:120]})"
        )
    mixed = {gpu["name"] for gpu in facts.gpus}
    if len(mixed) > 1:
        found.append(f"GPUs of different kinds in one run: {', '.join(sorted(mixed))}")
    return found


def _versions(facts: Facts) -> list[str]:
    found = []
    for name, oldest in OLDEST.items():
        have = facts.packages.get(name)
        if have and version(have) < version(oldest):
            found.append(f"{name} {have} is older than {oldest}, the oldest that is supported")
    megatron = facts.packages.get("megatron-core")
    if megatron and version(megatron) >= (0, 17) and facts.python < (3, 12):
        found.append(
            f"megatron-core {megatron} needs Python 3.12; 0.16.1 is the newest for "
            f"{facts.python[0]}.{facts.python[1]}"
        )
    if facts.python < (3, 10, 0):
        found.append("Python before 3.10 is not supported")
    return found


def _environment(facts: Facts) -> list[str]:
    found, given = [], facts.environment
    hopper_or_older = any(gpu["capability"][0] < 10 for gpu in facts.gpus)
    if hopper_or_older and given.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1":
        found.append(
            "Megatron overlaps tensor-parallel communication in order only with "
            "CUDA_DEVICE_MAX_CONNECTIONS=1 (before Blackwell), and refuses --sequence-parallel "
            "without"
        )
    for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SHM_DISABLE"):
        if given.get(name, "0") not in ("", "0"):
            found.append(f"{name}={given[name]}: the exchange takes a slower way; unset {name}")
    if not facts.gpus and "OMP_NUM_THREADS" not in given:
        found.append(
            "CPU ranks that each start a thread per core slow one another down: "
            "export OMP_NUM_THREADS=1"
        )
    return found
