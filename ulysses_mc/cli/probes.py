"""Facts about this machine. Nothing here raises: what cannot be found out is said to be so.

Heavy or fragile imports (torch, TransformerEngine) happen in a process of their own with a
deadline: a broken installation may hang, or end the process that imports it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import Any

from ..apex import nvidia_apex

DEADLINE = 4.0  # seconds; the probes run side by side, and an overloaded machine doubles the rest
PACKAGES = ("torch", "megatron-core", "transformer-engine", "flash-attn", "apex", "deepspeed",
            "transformers", "triton", "numpy", "psutil", "rich", "jsonargparse")  # fmt: skip
VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "OMP_NUM_THREADS",
             "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SHM_DISABLE", "NCCL_SOCKET_IFNAME",
             "GLOO_SOCKET_IFNAME", "PYTORCH_CUDA_ALLOC_CONF")  # fmt: skip

# Prints a line for torch and, if that is asked for, one for TransformerEngine.
_IMPORTS = """
import json, sys, torch
import torch.distributed as dist
there = dist.is_available()
facts = {
    "version": torch.__version__, "cuda_build": torch.version.cuda,
    "cuda": torch.cuda.is_available(), "gloo": there and dist.is_gloo_available(),
    "nccl": there and dist.is_nccl_available(), "nccl_version": None, "gpus": [],
}
try:
    facts["nccl_version"] = ".".join(map(str, torch.cuda.nccl.version()))
except Exception:
    pass
if facts["cuda"]:
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        facts["gpus"].append({"name": gpu.name, "memory": gpu.total_memory,
                              "capability": [gpu.major, gpu.minor]})
print(json.dumps(facts), flush=True)
if "te" in sys.argv:
    import transformer_engine, transformer_engine.pytorch
    print(json.dumps({"version": getattr(transformer_engine, "__version__", "?")}), flush=True)
"""


@dataclass(frozen=True)
class Facts:
    """What was found.

    Args:
        packages: installed version by name; absent if not installed.
        torch, te: what their imports said; with 'error' if they failed, with 'late' if they did
            not end in time (then torch's files speak); {} if not installed.
        nvidia_apex: apex by its contents: FusedAdam and the extension behind it.
        flash: the generations of FlashAttention whose parts are there.
        driver: what nvidia-smi says of the GPUs, '' without it. links: its topology table.
        driver_late: nvidia-smi did not answer in time.
    """

    python: tuple[int, int, int]
    packages: dict[str, str] = field(default_factory=dict)
    torch: dict[str, Any] = field(default_factory=dict)
    te: dict[str, Any] = field(default_factory=dict)
    nvidia_apex: bool = False
    flash: tuple[int, ...] = ()
    megatron_training: bool = False
    driver: str = ""
    driver_late: bool = False
    links: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def gpus(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.torch.get("gpus", [])
        return found


def gather(deadline: float = DEADLINE) -> Facts:
    """All facts, in at most about `deadline` seconds."""
    start = time.monotonic()
    packages = {name: version for name in PACKAGES if (version := _version(name))}
    with_te = "transformer-engine" in packages or has_module("transformer_engine")
    process = _start(_IMPORTS, ["te"] if with_te else []) if "torch" in packages else None
    driver, links, driver_late = _nvidia(deadline)
    torch, te = _finish(process, start + deadline) if process else ({}, {})
    if torch.get("late"):
        torch |= _torch_by_its_files(bool(driver))
    return Facts(
        python=sys.version_info[:3],
        packages=packages,
        torch=torch,
        te=te if with_te else {},
        nvidia_apex=nvidia_apex(),
        flash=_flash_generations(),
        megatron_training=_has_folder("megatron", "training"),
        driver=driver,
        driver_late=driver_late,
        links=links,
        environment={name: os.environ[name] for name in VARIABLES if name in os.environ},
        seconds=time.monotonic() - start,
    )


def has_module(name: str) -> bool:
    """Whether Python would find a module, without importing it."""
    try:
        return util.find_spec(name) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def _flash_generations() -> tuple[int, ...]:
    """By the compiled extension of 2 and 3 and by the kernels of 4, not by a package's name."""
    found = {
        2: has_module("flash_attn_2_cuda"),
        3: has_module("flash_attn_3") or has_module("flash_attn_interface"),
        4: _has_folder("flash_attn", "cute"),
    }
    return tuple(generation for generation, there in found.items() if there)


def _folders(package: str) -> list[Path]:
    try:
        spec = util.find_spec(package)
    except (ImportError, ValueError):
        return []
    return [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []


def _has_folder(package: str, inner: str) -> bool:
    return any((folder / inner).is_dir() for folder in _folders(package))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except Exception:  # a damaged installation raises all kinds of things
        return None


def _start(code: str, arguments: list[str]) -> subprocess.Popen[str] | None:
    try:
        return subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,  # imports start programs too: all of them end together
        )  # fmt: skip
    except OSError:
        return None


def _finish(process: subprocess.Popen[str], until: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the process said of torch and of TransformerEngine, or why it said nothing."""
    wait = max(until - time.monotonic(), 0.1)
    late = False
    try:
        out, err = process.communicate(timeout=wait)
    except subprocess.TimeoutExpired:
        late = True
        os.killpg(process.pid, signal.SIGKILL)
        out, err = _what_is_left(process)
    found: list[dict[str, Any]] = []
    for line in out.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # a library's own greeting
    lines = [line for line in err.splitlines() if line.strip()]
    reason = lines[-1][:300] if lines else f"exit code {process.returncode}"
    missing = {"late": True} if late else {"error": reason}
    found += [dict(missing) for _ in range(2 - len(found))]
    return found[0], found[1]


def _what_is_left(process: subprocess.Popen[str]) -> tuple[str, str]:
    """The output of a killed process; nothing if it hangs where no signal reaches it."""
    try:
        return process.communicate(timeout=1)
    except subprocess.TimeoutExpired:
        return "", ""


def _torch_by_its_files(driver: bool) -> dict[str, Any]:
    """What torch's files say of it, where its import takes too long."""
    text = ""
    for folder in _folders("torch"):
        file = folder / "version.py"
        text = file.read_text(errors="replace") if file.is_file() else text
    match = re.search(r"^cuda\b[^=]*= '([0-9.]+)'", text, re.MULTILINE)
    build = match[1] if match else None
    return {"cuda_build": build, "gloo": True, "nccl": build is not None,
            "cuda": build is not None and driver, "nccl_version": None, "gpus": []}  # fmt: skip


def _nvidia(deadline: float) -> tuple[str, str, bool]:
    """nvidia-smi's list of GPUs with the driver, its topology, and whether either came too late."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "", "", False
    query = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    commands = ([program, *query], [program, "topo", "-m"])
    with ThreadPoolExecutor(len(commands)) as pool:
        driver, links = pool.map(lambda command: _output(command, deadline), commands)
    return driver or "", links or "", driver is None or links is None


def _output(command: list[str], deadline: float) -> str | None:
    """What a program prints; '' if it fails, None if it takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline)
    except subprocess.TimeoutExpired:
        return None
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
