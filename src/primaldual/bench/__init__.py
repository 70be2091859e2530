"""Speed and memory on this machine, as shares of its ceilings and as ratios to the best fused softmax."""

from .case import Case, grid
from .measure import AttentionBench
from .targets import PRESETS, TARGETS, Target

__all__ = ["PRESETS", "TARGETS", "AttentionBench", "Case", "Target", "grid"]
