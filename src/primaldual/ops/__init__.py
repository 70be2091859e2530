"""How it runs: one function over every executor, and the plan that picks one."""

from ._attention import attention, plan
from .plan import EXECUTORS, Candidate, Plan
from .problem import CausalFormError, UnsupportedError
from .reference import ZeroNormalizerError

__all__ = [
    "EXECUTORS", "Candidate", "CausalFormError", "Plan", "UnsupportedError", "ZeroNormalizerError", "attention", "plan",
]  # fmt: skip
