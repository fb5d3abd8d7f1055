"""Which ranks form a tensor, pipeline, data, Ulysses, ring or expert group."""

from .config import ParallelConfig
from .errors import HeadDivisibilityError, ParallelConfigError
from .grid import RankGrid

__all__ = ["HeadDivisibilityError", "ParallelConfig", "ParallelConfigError", "RankGrid"]
