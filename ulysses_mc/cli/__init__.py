"""The command `ulysses-mc`: plan, explain, doctor, bench. Needs no GPU, no process group."""

from .main import main

__all__ = ["main"]
