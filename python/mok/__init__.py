"""MoK for PyTorch."""

from ._group import Group
from ._library import CallerError, Error, MismatchError, RunError, UnsupportedError, expert_range, version
from ._workspace import LayerGrads, LayerWeights, Shape, Workspace

__version__ = "0.1.0"
