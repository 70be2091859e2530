"""A whole attention layer as a problem: projections, pooling, statistics and attention, and the routes through them."""

from ...kernels.projection.output import project as project_output
from .plan import ROUTES, LayerPlan, attend, choose
from .problem import LayerProblem, Squash

__all__ = ["ROUTES", "LayerPlan", "LayerProblem", "Squash", "attend", "choose", "project_output"]
