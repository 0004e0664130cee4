"""MoK for PyTorch: one mixture-of-experts layer of a model in training, as one deterministic kernel per pass.

mok.MoE     the layer as a module
mok.moe     the layer as a differentiable function
mok.engine  a layer's shape and ranks, for those who route once and compute often
mok.trace   who did what when in a layer's calls
mok.doctor  what stands in the way on this machine
docs/pytorch.md has the rest.
"""

from ._engine import Engine, close_all, engine
from ._group import Group
from ._layer import moe
from ._library import CallerError, Error, MismatchError, RunError, UnsupportedError, backends, expert_range, version
from ._module import MoE, Routing
from ._mx import Quantised, weights_changed
from ._observe import Finding, doctor, trace
from ._workspace import LayerGrads, LayerWeights, Shape, Workspace

__version__ = "0.1.0"
