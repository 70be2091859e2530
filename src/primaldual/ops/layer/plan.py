"""Which route a layer takes, and why."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from ...dual import Expansion, GateAfterSum, derive
from .. import per_token
from ..devices import device_of
from ..estimates import Estimate
from ..plan import Candidate, duration, explanation
from ..problem import UnsupportedError
from . import grouped, grouped_mixed, pooled, recentred_projection, rotary, separate, unpooled
from .problem import LayerProblem

ROUTES: dict[str, ModuleType] = {
    "unpooled": unpooled,
    "grouped": grouped,
    "grouped_mixed": grouped_mixed,
    "recentred_projection": recentred_projection,
    "rotary": rotary,
    "pooled": pooled,
    "separate": separate,
}
"""The last one takes every layer."""

_WHY = {
    "unpooled": "one product for all tokens, pooled in the attention, and one launch for all heads",
    "grouped": "inputs are pooled before they are projected, and one launch attends for all heads",
    "grouped_mixed": "inputs are pooled before they are projected, and long heads go back through cuDNN's kernels",
    "recentred_projection": "queries come out of the projection re-centred",
    "rotary": "queries and keys come out of the projection with their rotary positions",
    "pooled": "inputs are pooled before they are projected, head by head",
    "separate": "every token is projected, and the attention has a plan of its own",
}


class LayerPlan(NamedTuple):
    """The route that was chosen, why the others were not, and what each would take."""

    route: str
    asked: bool
    candidates: tuple[Candidate, ...]
    estimates: dict[str, Estimate]
    assumptions: str
    expansion: Expansion
    """What the layer computes: the expansion of its primal, with the rewrites of the route and of the plans in it."""

    @property
    def reason(self) -> str:
        """Why this route."""
        if self.asked:
            return "asked for"
        rivals = {name: found for name, found in self.estimates.items() if name != self.route}
        if not rivals:
            return _WHY[self.route]
        rival = min(rivals, key=lambda name: rivals[name].seconds)
        mine = duration(self.estimates[self.route].seconds)
        return f"{mine} against {duration(rivals[rival].seconds)} ({rival}): {_WHY[self.route]}"

    def explain(self) -> str:
        """What was chosen and why; then for each route what it would take, or why it cannot."""
        return explanation(self.route, self.reason, self.candidates, self.estimates, self.assumptions, self.expansion)


def choose(p: LayerProblem) -> LayerPlan:
    """The plan for a layer: of the routes that can run it, what is estimated to take the least time."""
    candidates = tuple(Candidate(name, route.refusal(p)) for name, route in ROUTES.items())
    able = [name for name, reason in candidates if reason is None]
    found = {name: ROUTES[name].estimate(p) for name in able}
    best, asked = min(able, key=lambda name: found[name].seconds), p.layer.impl in ROUTES
    if asked:
        best = p.layer.impl
        if best not in able:
            raise _refused(best, dict(candidates)[best])
    inner = (rewrite for attention in ROUTES[best].inner(p) for rewrite in attention.expansion.rewrites)
    passes = "forward and backward" if p.trains else "forward"
    device = device_of(p.x.device)
    mode = "" if not device.host else ", captured" if p.captured else ", eager"
    return LayerPlan(
        best, asked, candidates, found, f"estimated for {str(p.dtype)[6:]}, {passes}{mode}, on {device.name}",
        derive(p.layer.primal, (GateAfterSum, *ROUTES[best].rewrites(p), *inner)),
    )  # fmt: skip


def attend(p: LayerProblem, known: dict[object, tuple[str, Expansion]]) -> tuple[Tensor, Tensor | None]:
    """Outputs [N, heads, L, head_dim], and weights where they are asked for, by the route of the layer's plan.

    `known` remembers the routes of calls of the same kind, and what they compute: it belongs to the layer.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        route = _unplanned(p)
        return _run(p, route, derive(p.layer.primal, (GateAfterSum, *ROUTES[route].rewrites(p))))
    kind = p.route_key()
    if (found := known.get(kind)) is None:
        if len(known) >= 256:
            known.clear()
        chosen = choose(p)
        found = known[kind] = chosen.route, chosen.expansion
    return _run(p, *found)


def _run(p: LayerProblem, route: str, expansion: Expansion) -> tuple[Tensor, Tensor | None]:
    """By this route, and gated, where it does not do that, too."""
    out, weights = ROUTES[route].run(p, expansion)
    primal = p.layer.primal
    if p.gate is not None:
        return per_token.gated(primal, out, weights, p.gate)
    if p.squash is None or (ROUTES[route] is rotary and rotary.gates(p)):
        return out, weights
    by = linear(p.x, *p.squash).unflatten(-1, (p.layer.num_heads, -1)).transpose(1, 2)
    return per_token.gated(primal, out, weights, by, squashed=True)


def _unplanned(p: LayerProblem) -> str:
    """The route where a compiler or a transform looks on, and nothing can be planned: one that is asked for, if any."""
    asked = p.layer.impl
    if asked not in ROUTES:
        return "pooled" if pooled.refusal(p) is None else "separate"
    if (reason := ROUTES[asked].refusal(p)) is not None:
        raise _refused(asked, reason)
    return asked


def _refused(route: str, reason: str | None) -> UnsupportedError:
    return UnsupportedError(f"impl={route!r} cannot compute this layer: {reason}; impl='auto' can")
