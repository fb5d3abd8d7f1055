"""Errors about a requested layout: the request, the arithmetic, the rule, what would work."""


class ParallelConfigError(ValueError):
    """A request that cannot be met exactly, refused before any collective on every rank.

    Args:
        request: what was asked for, with every number.
        arithmetic: the computation that shows why it fails.
        rule: the condition that a request must meet.
        nearest: the nearest settings that meet it, computed by the same rule.
    """

    def __init__(
        self, request: str, arithmetic: str = "", rule: str = "", nearest: str = ""
    ) -> None:
        super().__init__(request, arithmetic, rule, nearest)
        self.request, self.arithmetic, self.rule, self.nearest = request, arithmetic, rule, nearest

    def __str__(self) -> str:
        lines = [self.request]
        lines += [f"  {self.arithmetic}"] if self.arithmetic else []
        lines += [f"  Rule: {self.rule}"] if self.rule else []
        lines += [f"  Nearest that work: {self.nearest}"] if self.nearest else []
        return "\n".join(lines)


class HeadDivisibilityError(ParallelConfigError):
    """Attention heads that do not fit the tensor-parallel or Ulysses size asked for."""
