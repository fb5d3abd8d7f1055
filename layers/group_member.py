"""Copies of a module that holds a process group, which can be shared but not copied."""

from __future__ import annotations

import copy
from typing import Any

import torch.distributed as dist

from ..parallel_state.errors import ParallelConfigError


class GroupMember:
    """What makes copies of a module with a `group` share it, and refuses to pickle it."""

    group: dist.ProcessGroup

    def __copy__(self) -> GroupMember:
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupMember:
        memo[id(self.group)] = self.group
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ParallelConfigError(
            f"{type(self).__name__} as a whole in pickle or torch.save.",
            rule="it holds its process group, which exists in this run alone",
            nearest="torch.save(model.state_dict(), path), then load_state_dict into a model that "
            "is built with the group of the new run.",
        )
