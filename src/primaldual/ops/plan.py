"""Which executor runs a problem, and why."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

from . import block_sparse, linear, reference, sdpa
from .problem import Problem, UnsupportedError

EXECUTORS: dict[str, ModuleType] = {
    "linear": linear,
    "block_sparse": block_sparse,
    "sdpa": sdpa,
    "reference": reference,
}
"""In the order of preference: the first that can compute a problem is the cheapest that can."""

_WHY = {
    "linear": "Φ is finite, so the sum re-associates: O(N) instead of O(N²)",
    "block_sparse": "every query sees a subset, and only those scores are computed",
    "sdpa": "softmax heads on torch's fused kernels, one call per distinct key length",
    "reference": "the dense formula; nothing faster computes this",
}


class Candidate(NamedTuple):
    """An executor, and why it does not run the problem (None when it could)."""

    impl: str
    refusal: str | None


class Plan(NamedTuple):
    """The executor that was chosen, the reason, and every candidate."""

    impl: str
    reason: str
    candidates: tuple[Candidate, ...]

    def explain(self) -> str:
        """What was chosen and why, and why not the others."""
        lines = [f"{self.impl}: {self.reason}"]
        lines += [f"  not {c.impl}: {c.refusal}" for c in self.candidates if c.refusal]
        return "\n".join(lines)


def choose(problem: Problem, impl: str = "auto") -> Plan:
    """The plan for a problem. An explicit `impl` that cannot run it raises, and says which one can."""
    if impl != "auto" and impl not in EXECUTORS:
        raise ValueError(f"impl must be one of auto, {', '.join(EXECUTORS)}; got {impl!r}")
    candidates = tuple(Candidate(name, module.refusal(problem)) for name, module in EXECUTORS.items())
    able = [c.impl for c in candidates if c.refusal is None]
    if impl == "auto":
        if not able:
            raise UnsupportedError(f"no executor can compute this: {candidates[-1].refusal}")
        if able[0] == "block_sparse" and (reason := block_sparse.pass_over(problem)):
            candidates = tuple(c._replace(refusal=reason) if c.impl == able[0] else c for c in candidates)
            able = able[1:]
        return Plan(able[0], _WHY[able[0]], candidates)
    refusal = dict(candidates)[impl]
    if refusal is not None:
        hint = f"impl={able[0]!r} can" if able else "no executor can"
        raise UnsupportedError(f"impl={impl!r} cannot compute this: {refusal}; {hint}")
    return Plan(impl, "asked for", candidates)
