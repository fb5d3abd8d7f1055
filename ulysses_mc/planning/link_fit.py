"""alpha and beta of a link from measured times. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OPERATIONS = ("all_to_all", "all_gather", "all_reduce", "p2p")


@dataclass(frozen=True)
class Fit:
    """seconds = alpha + bytes / beta.

    Args:
        alpha: seconds. beta: bytes per second. error: the largest relative error of the points.
    """

    alpha: float
    beta: float
    error: float

    def seconds(self, nbytes: float) -> float:
        return self.alpha + nbytes / self.beta


def bytes_sent(operation: str, size: float, ranks: int) -> float:
    """Bytes that a rank sends for a buffer of `size` bytes (all-gather: the gathered one)."""
    part = (ranks - 1) / ranks
    return {"all_to_all": part, "all_gather": part, "all_reduce": 2 * part, "p2p": 1.0}[
        operation
    ] * size


def fit(points: Sequence[tuple[float, float]]) -> Fit:
    """The least squares of the relative error, with alpha >= 0 and beta > 0.

    Args:
        points: (bytes, seconds), two or more, with seconds above 0.
    """
    # Weights 1/t^2: minimise sum(((a + b x - t) / t)^2) over a and b = 1/beta.
    ones = sum(1 / t**2 for _, t in points)
    x1 = sum(x / t**2 for x, t in points)
    x2 = sum(x * x / t**2 for x, t in points)
    t0 = sum(1 / t for _, t in points)
    t1 = sum(x / t for x, t in points)
    determinant = ones * x2 - x1 * x1
    slope = (ones * t1 - x1 * t0) / determinant if determinant > 0 else 0.0
    alpha = (t0 - slope * x1) / ones
    if alpha < 0:
        alpha, slope = 0.0, t1 / x2
    if slope <= 0:  # nothing but latency was seen
        largest = max(points)
        alpha, slope = t0 / ones / 2, largest[1] / largest[0] / 2
    error = max(abs(alpha + slope * x - t) / t for x, t in points)
    return Fit(alpha, 1 / slope, error)
