"""The small data of the example's tests."""

from tests.examples.conftest import small_data

__all__ = ["small_data"]
