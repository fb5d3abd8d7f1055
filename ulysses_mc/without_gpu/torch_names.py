"""torch.cuda without a GPU: names that mean the CPU, and the translation of devices in calls."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .te_names import asked_by_te

_CPU = torch.device("cpu")


class CudaMeansCpu(TorchFunctionMode):
    """Translates the device in calls of torch functions and tensor methods."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        # Pinned memory exists for copies to a GPU; without one, asking for it is an error.
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func in _IDENTITIES:
            return args[0]
        if func == _IS_CUDA and asked_by_te(1):  # its attention takes nothing else
            return True
        if func is torch.Tensor.to:
            args = tuple(_CPU if _names_cuda(argument) else argument for argument in args)
        elif func is torch.Tensor.record_stream:
            return None
        elif func is torch.Tensor.type and len(args) == 1 and not kwargs and _asked_by_megatron():
            # The optimizers sort parameters by `.type()` and refuse all but CUDA's names.
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


_IDENTITIES = (torch.Tensor.cuda, torch.Tensor.pin_memory)
_IS_CUDA: Any = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]


def _is_cuda(device: object) -> bool:
    """Whether a `device=` argument names a GPU: 'cuda', 'cuda:0', torch.device, 0."""
    return isinstance(device, int) or _names_cuda(device)


def _names_cuda(argument: object) -> bool:
    if isinstance(argument, torch.device):
        return argument.type == "cuda"
    return isinstance(argument, str) and argument.startswith("cuda")


def _asked_by_megatron() -> bool:
    """Whether the caller of the function that is being translated is Megatron."""
    name = sys._getframe(2).f_globals.get("__name__", "")
    return isinstance(name, str) and name.startswith("megatron.")


class _Stream:
    """Stands for every CUDA stream and event: on the CPU all work is done when a call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Stream()

    def synchronize(self) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def query(self) -> bool:
        return True


_CURRENT_STREAM = _Stream()


# One named function per replacement: torch.compile refuses one object under several names.
def _current_device() -> torch.device:
    return _CPU


def _set_device(device: Any) -> None: ...


def _synchronize(device: Any = None) -> None: ...


def _stream(stream: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _current_stream(device: Any = None) -> _Stream:
    return _CURRENT_STREAM


def _get_rng_state(device: Any = "cuda") -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, device: Any = "cuda") -> None:
    torch.set_rng_state(state)


def _manual_seed(seed: int) -> None:
    torch.manual_seed(seed)


def _translating(run: Callable[..., Any]) -> Callable[..., Any]:
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with CudaMeansCpu():
            return run(*args, **kwargs)

    return run_backward


def torch_replacements() -> Iterator[tuple[Any, str, Any]]:
    cuda = torch.cuda
    # `backward` is itself a translated call, and what is inside one is not translated again; but
    # recomputation runs the model's forward pass in there.
    autograd: Any = torch.autograd
    yield autograd, "_engine_run_backward", _translating(autograd._engine_run_backward)
    # Asked for in two hundred places; raises without a GPU.
    yield cuda, "current_device", _current_device
    yield cuda, "set_device", _set_device
    # After communication, in timers and before checkpoints; raises without a GPU.
    yield cuda, "synchronize", _synchronize
    # MoE token dispatchers and shared experts, and the asynchronous checkpoint writer.
    yield cuda, "Stream", _Stream
    yield cuda, "Event", _Stream
    yield cuda, "stream", _stream
    yield cuda, "current_stream", _current_stream
    # The random number tracker keeps one state per name and swaps them in and out of "the CUDA
    # generator". Dropout on CPU tensors draws from the CPU's, so that is the one to swap.
    yield cuda, "get_rng_state", _get_rng_state
    yield cuda.random, "get_rng_state", _get_rng_state
    yield cuda, "set_rng_state", _set_rng_state
    yield cuda, "manual_seed", _manual_seed
