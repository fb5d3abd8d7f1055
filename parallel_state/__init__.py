"""Which ranks form a tensor, pipeline, data, Ulysses, ring or expert group."""

from .errors import HeadDivisibilityError, ParallelConfigError

__all__ = ["HeadDivisibilityError", "ParallelConfigError"]
