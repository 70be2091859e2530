"""Which executor runs a problem, and why."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ..dual import Expansion, GateAfterSum, derive
from ..kernels.launching import captured, exporting
from ..primal import Polynomial
from . import block_sparse, dense, linear, mixed, per_token, ragged, recentred, reference, sdpa
from .estimates import Estimate, Sizes, estimate, sizes_of
from .problem import Problem, UnsupportedError, require

EXECUTORS: dict[str, ModuleType] = {
    "linear": linear,
    "block_sparse": block_sparse,
    "recentred": recentred,
    "sdpa": sdpa,
    "ragged": ragged,
    "mixed": mixed,
    "dense": dense,
    "reference": reference,
}
"""The last one decides what is correct."""

MATRIX = ("dense", "reference")
"""These hold every score in memory, and run where no other can."""

EXPORTED = ("linear", "sdpa", "dense", "reference")
"""What an exported program is made of: torch's own operators, at every length."""

_WHY = {
    "linear": "Φ is finite, so the sum re-associates: O(N) instead of O(N²)",
    "block_sparse": "every query sees a subset, and only those scores are computed",
    "sdpa": "torch's fused kernels, one call per distinct key length",
    "recentred": "cuDNN's kernels, and two passes over memory each way for the re-centring",
    "ragged": "one launch for all scales",
    "mixed": "our kernel forward, and cuDNN's backward for long heads",
    "dense": "every score once, in one matrix",
    "reference": "the dense formula; nothing faster computes this",
}

WIDTH = 80
"""Columns of an explanation."""


class Candidate(NamedTuple):
    """An executor, and why it cannot run the problem (None when it can)."""

    impl: str
    refusal: str | None


class Plan(NamedTuple):
    """The executor that was chosen, every candidate, and what their estimates depend on."""

    impl: str
    asked: bool
    candidates: tuple[Candidate, ...]
    sizes: Sizes
    expansion: Expansion
    """What the executor computes: the expansion of the primal, with the rewrites that it makes use of."""

    @property
    def estimates(self) -> dict[str, Estimate]:
        """What each executor that can run the problem would take."""
        return {c.impl: estimate(c.impl, self.sizes) for c in self.candidates if c.refusal is None}

    @property
    def reason(self) -> str:
        """Why this executor."""
        if self.asked:
            return "asked for"
        found = self.estimates
        mine = found.pop(self.impl)
        found = {name: taken for name, taken in found.items() if name not in MATRIX}
        why = _WHY[self.impl]
        if self.impl == "ragged" and self.sizes.pieces:
            why = "one launch, which computes every score and keeps the pattern's"
        elif self.impl == "ragged" and len(self.sizes.groups) == 1:
            why = "one launch, and no padding of narrow heads"
        if not found:
            return why
        rival = min(found, key=lambda impl: found[impl].seconds)
        if found[rival].host > found[rival].device:
            why = "less work for the host"
        return f"{duration(mine.seconds)} against {duration(found[rival].seconds)} ({rival}): {why}"

    def explain(self) -> str:
        """What was chosen and why; then for each candidate what it would take, or why it cannot."""
        sizes = self.sizes
        passes = "forward and backward" if sizes.backward else "forward"
        mode = "" if not sizes.device.host else ", captured" if sizes.captured else ", eager"
        assumptions = f"estimated for {str(sizes.dtype)[6:]}, {passes}{mode}, on {sizes.device.name}"
        return explanation(self.impl, self.reason, self.candidates, self.estimates, assumptions, self.expansion)


def explanation(
    chosen: str, reason: str, candidates: Iterable[Candidate], estimates: Mapping[str, Estimate], assumptions: str,
    expansion: Expansion,
) -> str:  # fmt: skip
    """What was chosen and why; then for each candidate what it would take, or why it cannot."""
    candidates = tuple(candidates)
    column = max(len(candidate.impl) for candidate in candidates)
    lines = [textwrap.fill(f"{chosen}: {reason}", WIDTH, subsequent_indent="  ")]
    for name, refusal in candidates:
        said = f"cannot: {refusal}" if refusal is not None else _line(estimates[name])
        lines.append(textwrap.fill(f"  {name:{column}s}  {said}", WIDTH, subsequent_indent=" " * (column + 4)))
    applied = "; ".join(rewrite.name for rewrite in expansion.rewrites) or "none, the sum as it is written"
    lines.append(textwrap.fill(f"  rewrites: {applied}", WIDTH, subsequent_indent="    "))
    return "\n".join([*lines, f"  {assumptions}"])


def _line(cost: Estimate) -> str:
    launches = f"{cost.launches} launch{'es' if cost.launches != 1 else ''}"
    numbers = f"{amount(cost.flops, 'FLOP'):>10s}  {amount(cost.bytes, 'B'):>7s}  {launches:>13s}"
    return f"{numbers}  {duration(cost.seconds):>7s}" + (" (host)" if cost.host > cost.device else "")


def mode_of(q: Tensor) -> tuple[bool, bool]:
    """What a choice depends on beside the arguments: whether gradients are kept, and whether a graph is captured."""
    return torch.is_grad_enabled() and q.requires_grad, captured(q)


def choose(problem: Problem, impl: str = "auto") -> Plan:
    """The plan for a problem: what is estimated to take the least time, and a matrix of scores where nothing else can.

    An explicit `impl` that cannot run it raises, and says which one can.
    """
    if impl != "auto" and impl not in EXECUTORS:
        raise ValueError(f"impl must be one of auto, {', '.join(EXECUTORS)}; got {impl!r}")
    candidates = tuple(Candidate(name, module.refusal(problem)) for name, module in EXECUTORS.items())
    refusals = dict(candidates)
    able = [name for name in EXECUTORS if refusals[name] is None]
    if impl != "auto" and refusals[impl] is not None:
        hint = f"impl={able[0]!r} can" if able else "no executor can"
        raise UnsupportedError(f"impl={impl!r} cannot compute this: {refusals[impl]}; {hint}")
    if not able:
        raise UnsupportedError(f"no executor can compute this: {refusals['reference']}")
    sizes = sizes_of(problem, *mode_of(problem.q))
    if impl != "auto":
        return Plan(impl, True, candidates, sizes, expansion_for(impl, problem))
    fast = [name for name in able if name not in MATRIX]
    if fast == ["linear"] and _many_features(problem):
        fast = [name for name in able if name != "reference"]
    best = (fast or able)[0]
    if len(fast) > 1:
        seconds = [estimate(name, sizes).seconds for name in fast]
        best = fast[seconds.index(min(seconds))]  # a compiler traces this, but not min(key=...)
    return Plan(best, False, candidates, sizes, expansion_for(best, problem))


MANY = 4
"""From so many features for each key on they take several times the memory of the scores."""


def _many_features(problem: Problem) -> bool:
    """Whether a matrix of scores is no last resort: where the kernel needs no features, and these are many more."""
    features, dim = problem.primal.features, problem.q.shape[-1]
    return type(features) is Polynomial and features.dim(dim) > MANY * problem.k.shape[2]


def expansion_for(impl: str, problem: Problem) -> Expansion:
    """The problem's expansion, rewritten as this executor computes it."""
    return derive(problem.expansion.primal, (GateAfterSum, *EXECUTORS[impl].rewrites(problem)))


def execute(problem: Problem, impl: str) -> tuple[Tensor, Tensor | None]:
    """Outputs and, where they are asked for, weights, by an executor that can run the problem as it is stated."""
    return run(replace(problem, expansion=expansion_for(impl, problem)), impl)


def run(problem: Problem, impl: str) -> tuple[Tensor, Tensor | None]:
    """The same of a problem to which the expansion of its plan is bound."""
    out, weights = _no_queries(problem) if problem.q.shape[2] == 0 else EXECUTORS[impl].run(problem)
    if problem.gate is None:
        return out, weights
    require(problem.expansion, GateAfterSum)
    return per_token.gated(problem.expansion.primal, out, weights, problem.gate)


def _no_queries(p: Problem) -> tuple[Tensor, Tensor | None]:
    """Nothing, whose gradients are zero."""
    others = (p.k, p.v, *(x for x in p.parameters.values() if x.requires_grad))
    nothing = p.q[..., :1] + 0 * sum(x.sum() for x in others)
    weights = nothing.expand(-1, -1, -1, p.k.shape[2]) if p.need_weights else None
    return nothing.expand(-1, -1, -1, p.v.shape[3]), weights


def bind(problem: Problem, impl: str) -> tuple[str, Problem]:
    """The executor, and the problem with the expansion of its plan.

    What is exported is not planned, since it runs at other lengths.
    """
    if not exporting():
        chosen = choose(problem, impl)
        return chosen.impl, replace(problem, expansion=chosen.expansion)
    names = EXPORTED if impl == "auto" else (impl,)
    refusals = [EXECUTORS[name].refusal(problem) for name in names]
    for name, refusal in zip(names, refusals, strict=True):
        if refusal is None:
            return name, replace(problem, expansion=expansion_for(name, problem))
    raise UnsupportedError(f"impl={impl!r} cannot compute this: {refusals[-1]}")


def amount(value: float, unit: str) -> str:
    """Two or three digits and a prefix: 8.1 GFLOP, 98 MB."""
    prefixes = "_kMGTP"
    while value >= 999.5 and len(prefixes) > 1:
        value, prefixes = value / 1000, prefixes[1:]
    prefix = prefixes[0].strip("_")
    return f"{value:.1f} {prefix}{unit}" if prefix and value < 9.95 else f"{value:.0f} {prefix}{unit}"


def duration(seconds: float) -> str:
    """Two or three digits of s, ms or µs."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 0.9995 or unit == "µs":
            break
    value = seconds * factor
    return f"{value:.0f} {unit}" if value >= 99.5 else f"{value:.2g} {unit}"
