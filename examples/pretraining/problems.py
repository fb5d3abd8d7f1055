"""What is wrong with a run, told all at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ulysses_mc.parallel_state import ParallelConfigError

from .errors import UserError

T = TypeVar("T")


class Problems:
    """What is wrong, collected: a step that fails does not keep the others from being tried."""

    def __init__(self) -> None:
        self.found: list[ValueError] = []

    def of(self, step: Callable[..., T], *arguments: object) -> T | None:
        """What `step` returns; None if it found something wrong."""
        try:
            return step(*arguments)
        except (UserError, ParallelConfigError) as error:
            self.add(error)
            return None

    def add(self, error: ValueError) -> None:
        if str(error) not in map(str, self.found):
            self.found.append(error)

    def tell(self) -> None:
        """Raises what was found: one error as it is, several as a numbered list of all."""
        if len(self.found) == 1:
            raise self.found[0]
        if self.found:
            texts = (str(error).replace("\n", "\n   ") for error in self.found)
            lines = "\n".join(f"  {n}. {text}" for n, text in enumerate(texts, 1))
            raise UserError(f"{len(self.found)} problems:\n{lines}")
