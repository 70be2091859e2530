"""Measure every claim on a problem of a mechanism: it is solved, one function by three routes, and recovered.

The solution by W on features, by α on kernels and by `attention` on values must be one function; and a head with any
values must come back from the regression that `recover` names.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..dual import GroupHeadsByScale
from ..dual.form import pooling_of
from ..primal import Primal, as_primal
from ..svr.design import design, hides_points, in_common, unpool
from ..svr.fit import Fit, KernelError, NotConvergedWarning, fit
from .certification import Certification, Check, worst
from .drawn import Drawn, draw, fitting_length, length_that_hides
from .recovery import recover

GAP = 1e-8
"""Relative duality gap: well over float64 rounding of the objectives, well under any tolerance of the outputs."""

KKT = 1e-6
"""Residuals are of first order in the error of α, the gap of second."""

ROUTES = 1e-8
"""Two ways to sum the same float64 terms differ by rounding alone, which cancelling terms amplify."""

RECOVERY = 1e-6
"""Outputs are of first order in the error of α; α itself is compared where the condition is at most `UNIQUE`."""

UNIQUE = 1e8
"""Condition number up to which float64 determines α."""

PRICE = 3.0
"""C over the median h(k): values of up to about this size are free, so zero, free and bounded α all occur."""

SHIFTS = 6
"""Points at which the function of one query of a sparse head is compared."""


def certify(
    mechanism: str | Primal,
    *,
    length: int | None = None,
    head_dim: int = 8,
    heads: int | None = None,
    values: int = 3,
    seed: int = 0,
    epsilon: float = 0.1,
    bias: bool = False,
) -> Certification:
    """Check on a random problem that this mechanism is the dual of its regression.

    Args:
        mechanism: a name, or a primal layer.
        length: how many keys; 24 unless given, or as many more as a sparse pattern needs to hide one. A mechanism on a
            grid takes the nearest length that it can.
        head_dim, values: dimensions of keys and of outputs.
        heads: 4, or as many as the mechanism has scales.
        seed: of keys, queries, targets, values and learned parameters.
        epsilon, bias: of the regression.

    >>> certify("bn+sh").ok
    True
    """
    given = as_primal(mechanism)
    if length is None:
        length = length_that_hides(given.training_set)
    for name, count in (("length", length), ("head_dim", head_dim), ("heads", heads or 1), ("values", values)):
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")
    primal = replace(given, bias=False, residual=False)  # the layer's, outside the head's regression
    pooled = pooling_of(primal.training_set)
    heads = heads or (len(pooled.scales) if pooled and pooled.scales else 4)
    tokens = fitting_length(primal, length)
    notes = [f"length {tokens}, not {length}; the patches must fill the grid"] if tokens != length else []
    sparse = hides_points(primal.training_set, heads, tokens)
    queries = tuple(sorted({0, tokens // 2, tokens - 1})) if sparse else ()
    drawn = draw(primal, tokens, head_dim, heads, values, seed)
    if drawn.outputs > 1:
        notes.append("one regression for each output of a head, which has a gate of its own")
    if queries:
        notes.append(f"one regression per query; the worst over queries {', '.join(map(str, queries))}")
    alpha = {"zero": 0, "free": 0, "bound": 0}
    found: dict[str, list[Check]] = {}
    try:
        for query in queries or (None,):
            solved = _solve(drawn, epsilon, bias, query)
            for kind, count in _kinds(solved).items():
                alpha[kind] += count
            for check in _checks(drawn, solved, epsilon, query):
                found.setdefault(check.name, []).append(check)
    except KernelError as error:
        found = {"kernel": [Check("kernel", math.nan, 0.0, str(error))]}
    return Certification(
        mechanism if isinstance(mechanism, str) else repr(given), tokens, heads, head_dim, values, seed, epsilon, bias,
        queries, alpha, tuple(map(worst, found.values())), tuple(notes),
    )  # fmt: skip


def _solve(drawn: Drawn, epsilon: float, bias: bool, query: int | None) -> Fit:
    made = design(drawn.primal, drawn.keys, drawn.targets, None, query, False, drawn.at_keys)
    log_h = made.log_h.masked_fill(~made.visible, torch.nan).nanmedian(-1).values
    return _fit(drawn, drawn.targets, PRICE * log_h.exp(), epsilon, bias, query)


def _fit(drawn: Drawn, targets: Tensor, price: Tensor, epsilon: float, bias: bool, query: int | None) -> Fit:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)  # the gap is one of the checks
        return fit(
            drawn.primal, drawn.keys, targets, C=price, epsilon=epsilon, bias=bias, query=query,
            parameters=drawn.at_keys,
        )  # fmt: skip


def _kinds(solved: Fit) -> dict[str, int]:
    size = (solved.alpha + solved.alpha_tilde)[solved.seen]
    bound = size >= (solved.prices[solved.seen].unsqueeze(-1) * (1 - 1e-9))
    zero = size == 0
    return {"zero": int(zero.sum()), "free": int((~zero & ~bound).sum()), "bound": int((bound & ~zero).sum())}


def _checks(drawn: Drawn, solved: Fit, epsilon: float, query: int | None) -> Iterator[Check]:
    """Every check of one problem, in the order of the table."""
    c = solved.certificate
    yield Check("duality gap", _largest(c.gap), GAP)
    for name in ("primal_feasibility", "dual_domain", "complementarity", "stationarity"):
        yield Check(name.replace("_", " "), _largest(getattr(c, name)), KKT)
    yield Check("condition number", _largest(c.condition))
    points = solved.seen.sum(-1).flatten()
    missing = points - c.rank.flatten()
    head = int(missing.argmax())
    rank = f"rank {int(points[head] - missing[head])} of {int(points[head])}"
    unique = not bool(missing.any())
    yield Check("rank deficiency", float(missing[head]), note=rank if unique else f"{rank}: α is not unique")
    by_alpha = _outputs(lambda x: solved.predict(x, gate=drawn.gate(x)), drawn.queries, query)
    if drawn.primal.features.finite:
        by_w = _outputs(lambda x: solved.predict(x, by="primal", gate=drawn.gate(x)), drawn.queries, query)
        yield Check("by W vs by α", _difference(by_w, by_alpha), ROUTES)
    else:
        yield Check("by W vs by α", None, ROUTES, "no finite Φ")
    values = _per_token(drawn, solved.values)
    by_attention = _outputs(lambda x: drawn.attend(x, values), drawn.queries, query) + solved.bias.unsqueeze(-2)
    yield Check("by attention vs by α", _difference(by_attention, by_alpha), ROUTES)
    yield from _recovery(drawn, epsilon, query)


def _recovery(drawn: Drawn, epsilon: float, query: int | None) -> Iterator[Check]:
    """Name the regression of a head with random values, solve it, and compare."""
    names = ("recovery, at keys", "recovery, at queries", "recovery, α")
    pooled = pooling_of(drawn.primal.training_set)
    if pooled is not None and pooled.how == "conv":
        yield from (Check(name, None, RECOVERY, "conv pooling: targets per token do not follow") for name in names)
        return
    named = recover(drawn.primal, drawn.keys, drawn.values, epsilon=epsilon, query=query, parameters=drawn.at_keys)
    again = _fit(drawn, named.targets, named.C, epsilon, False, query)
    gap = _largest(again.certificate.gap)
    unsolved = "" if gap <= GAP else f"solved to a gap of {gap:.0e} only"
    for name, x in zip(names, (drawn.keys, drawn.queries), strict=False):
        head = _outputs(lambda y: drawn.attend(y, drawn.values), x, query)
        found = _outputs(lambda y: again.predict(y, gate=drawn.gate(y)), x, query)
        yield Check(name, _difference(found, head), RECOVERY, unsolved)
    determined = named.unique & (named.condition <= UNIQUE)
    if not bool(determined.any()):
        reason = f"condition over {UNIQUE:.0e}" if bool(named.unique.any()) else "α is not unique"
        yield Check(names[-1], None, RECOVERY, reason)
        return
    alpha = (again.alpha - again.alpha_tilde)[determined]
    yield Check(names[-1], _difference(alpha, named.alpha[determined]), RECOVERY)


def _outputs(function: Callable[[Tensor], Tensor], x: Tensor, query: int | None) -> Tensor:
    """f(x); of a sparse head row `query` alone, with different points of x brought to that row."""
    if query is None:
        return function(x)
    shifts = range(0, x.shape[-2], -(-x.shape[-2] // SHIFTS))
    return torch.cat([function(x.roll(shift, -2))[..., query : query + 1, :] for shift in shifts], -2)


def _per_token(drawn: Drawn, values: Tensor) -> Tensor:
    """Values of points [1, H, W, Dv] to values of tokens that pool to them."""
    primal, keys = drawn.primal, drawn.keys
    heads, tokens = keys.shape[1:3]
    keys = primal.on_tokens(keys, torch.arange(tokens), drawn.parameters)
    seen = torch.ones(1, 1, 1, tokens, dtype=torch.bool)
    # what pooling makes of each token alone, and of ones
    probe = torch.cat([torch.eye(tokens, dtype=keys.dtype), torch.ones(tokens, 1, dtype=keys.dtype)], -1)
    spread = values.new_zeros(1, heads, tokens, values.shape[-1])
    for scale, group in GroupHeadsByScale.groups(primal.training_set.head_scales(heads)):
        index = list(group)
        probes = probe.expand(1, len(index), -1, -1)
        made = primal.training_set.reduce(keys[:, index], probes, seen, scale, drawn.parameters).values.squeeze(2)
        total = made[..., tokens:]
        shares = made[..., :tokens] / total
        owner = shares.abs().argmax(-2)  # [1, h, N]
        per_point = values[:, index, : made.shape[2]] / total
        spread[:, index] = unpool(per_point, owner, shares if in_common(shares) else None)
    return spread


def _difference(one: Tensor, other: Tensor) -> float:
    """The largest deviation, relative to the largest entry."""
    return _largest((one - other).abs()) / max(_largest(other.abs()), 1e-300)


def _largest(x: Tensor) -> float:
    return float(x.max())
