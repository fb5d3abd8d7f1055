"""The one exception that means "the user can put this right"."""

from __future__ import annotations


class UserError(ValueError):
    """Wrong input: printed as one message, without a traceback, and the exit code is 2."""


class SeenByOneRank(ValueError):
    """Wrong input that other ranks do not meet: they are told of it, and end too."""
