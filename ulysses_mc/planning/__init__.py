"""Plans a run before it is launched: memory, bytes, time and heads of every layout.

Pure arithmetic: needs neither torch nor Megatron, a process group or a GPU. docs/planning.md
gives the formulas, their sources and their errors against published numbers.
"""

from .estimate import Estimate
from .hardware import GPU, GPUS, Link, read_gpu
from .job import Job, Setting
from .model import MLAShape, ModelShape, MoEShape
from .presets import PRESETS, preset
from .problems import Problem, RequestError
from .search import Dropped, Limits, Plan, search

__all__ = [
    "GPU",
    "GPUS",
    "PRESETS",
    "Dropped",
    "Estimate",
    "Job",
    "Limits",
    "Link",
    "MLAShape",
    "MoEShape",
    "ModelShape",
    "Plan",
    "Problem",
    "RequestError",
    "Setting",
    "preset",
    "read_gpu",
    "search",
]
