"""Exact rewrites of the support vector expansion. Each class is one identity, its condition, and its arithmetic."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from ..primal import Gated, Moments, PointMap, Primal, Scale
from ..primal.features import Parameters
from .form import form_of, is_affine, kernel_of, pooling_of


class Rewrite(ABC):
    """An identity between two ways to compute the same expansion; a property of `Expansion` says what it changes."""

    name: ClassVar[str]
    identity: ClassVar[str]
    identity_latex: ClassVar[str]

    @staticmethod
    @abstractmethod
    def refusal(primal: Primal) -> str | None:
        """Why the identity does not hold or gains nothing for this primal; None where it applies."""


class GateAfterSum(Rewrite):
    """A gate divides h, which the terms of a sum have in common, so that it may multiply the sum.

    Σ_j κ(x, k_j) v_j / (h(x)/g(x)) = g(x) ⊙ Σ_j κ(x, k_j) v_j / h(x), for one gate or one for each channel.
    """

    name = "the gate after the sum"
    identity = "Σ_j κ_ij v_j / (h_i/g_i) = g_i ⊙ Σ_j κ_ij v_j / h_i"
    identity_latex = r"\sum_j\frac{\kappa_{ij}}{h_i/g_i}\,v_j=g_i\odot\sum_j\frac{\kappa_{ij}}{h_i}\,v_j"

    @staticmethod
    def refusal(primal: Primal) -> str | None:
        return None if isinstance(primal.normalizer, Gated) else "the normalizer has no gate"


class RowConstantsCancel(Rewrite):
    """Under softmax, terms of the score that do not depend on the key cancel.

    With T x = (x − a) ⊙ c,  (Tq)·(Tk_j) = ((q − a) ⊙ c²)·k_j − ((q − a) ⊙ c²)·a,  and the last term is the same for
    every j. So keys stay as they are and the query alone is mapped, by q ↦ (q − a) ⊙ c²: Eqn. bn-attn-expanding.
    It holds when κ is exponential, h is the kernel sum, and the map is the last one. Of `Scale` a is 0.
    """

    name = "row constants cancel"
    identity = "softmax_j((q−a)⊙c · (k_j−a)⊙c) = softmax_j((q−a)⊙c² · k_j)"
    identity_latex = (
        r"\mathrm{softmax}_j\big(((q-a)\odot c)^\top((k_j-a)\odot c)\big)"
        r"=\mathrm{softmax}_j\big(((q-a)\odot c^2)^\top k_j\big)"
    )

    @staticmethod
    def refusal(primal: Primal) -> str | None:
        if not form_of(primal).cancels:
            return "nothing cancels unless κ is exponential and h the kernel sum"
        last = primal.point_maps[-1] if primal.point_maps else None
        if last is None or not is_affine(last):
            return "the last input map is not of the form (x − a) ⊙ c"
        return None

    @staticmethod
    def query(q: Tensor, map_: PointMap, moments: Moments, parameters: Parameters) -> Tensor:
        """The one-sided map: (q − a) ⊙ c²."""
        if type(map_) is Scale:
            factor = map_.factor(q, parameters)
            return (q * (factor * factor)).to(q.dtype)
        form = map_.affine(moments, parameters)
        assert form is not None
        shift, scale = form
        return (q - shift if scale is None else (q - shift) * scale.square()).to(q.dtype)


class NormsOfKeysAreBias(Rewrite):
    """Under the sum of a Gaussian kernel the length of the query cancels, and that of a key is a bias on its score.

    −|x − k_j|²/2 = x·k_j − |k_j|²/2 − |x|²/2, whose last term is the same for every j. So a Gaussian head is a softmax
    head with a bias on its keys. Keys are those after the input maps.
    """

    name = "norms of keys are a bias"
    identity = "exp(−|x−k_j|²/2) / Σ_l exp(−|x−k_l|²/2) = softmax_j(x·k_j − |k_j|²/2)"
    identity_latex = (
        r"\frac{e^{-\|x-k_j\|^2/2}}{\sum_l e^{-\|x-k_l\|^2/2}}"
        r"=\mathrm{softmax}_j\big(x^\top k_j-\tfrac12\|k_j\|^2\big)"
    )

    @staticmethod
    def refusal(primal: Primal) -> str | None:
        if kernel_of(primal.features) != "gaussian" or not form_of(primal).kernel_sum:
            return "nothing cancels unless κ is Gaussian and h the kernel sum"
        return None


class PoolBeforeProjection(Rewrite):
    """The mean of projected tokens is the projection of their mean.

    mean_{t∈w}(A x_t + b) = A mean_{t∈w}(x_t) + b for weights that sum to one, so a head pooled by s projects N/s
    tokens instead of N (Remark downsample-x). It holds for the mean and an affine projection only.
    """

    name = "pool before the projection"
    identity = "mean_{t∈w}(A x_t + b) = A·mean_{t∈w}(x_t) + b"
    identity_latex = r"\tfrac{1}{|w|}\sum_{t\in w}(A x_t+b)=A\,\tfrac{1}{|w|}\sum_{t\in w}x_t+b"

    @staticmethod
    def refusal(primal: Primal) -> str | None:
        pooled = pooling_of(primal.training_set)
        if pooled is None:
            return "keys are not pooled"
        if pooled.how != "mean":
            return f"{pooled.how} pooling does not commute with a projection"
        if primal.token_maps:
            return f"{primal.token_maps[0]!r} acts on projected tokens, before pooling"
        return None


class Reassociate(Rewrite):
    """For a finite Φ the sum over keys does not depend on the query.

    Σ_j (Φ(q)·Φ(k_j)) v_j = Φ(q)ᵀ (Σ_j Φ(k_j) v_jᵀ), so the cost is O(N D_φ D_v) instead of O(N²).
    It holds whenever every query sees the same keys (causal: the prefix sums of them).
    """

    name = "re-association"
    identity = "Σ_j (Φ(q)·Φ(k_j)) v_j = Φ(q)ᵀ · (Σ_j Φ(k_j) v_jᵀ)"
    identity_latex = r"\sum_j(\Phi(q)^\top\Phi(k_j))\,v_j=\Phi(q)^\top\Big(\sum_j\Phi(k_j)v_j^\top\Big)"

    @staticmethod
    def refusal(primal: Primal) -> str | None:
        if not primal.features.finite:
            return f"{primal.features!r} is not finite"
        if not (form := form_of(primal)).finite:
            return f"{primal.features!r} has a kernel of its own, which need not be the product of its features"
        if form.subset != "all":
            return "every query has its own subset of keys"
        return None

    @staticmethod
    def expand(phi_q: Tensor, phi_k: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """(Σ_j κ_j v_j, Σ_j κ_j) from Φ(q) [..., L, F], Φ(k) [..., S, F] and values [..., S, Dv]."""
        state = phi_k.transpose(-1, -2) @ values
        return phi_q @ state, phi_q @ phi_k.sum(-2).unsqueeze(-1)


class KeepPattern(Rewrite):
    """Keys that a query does not see have no term in its sum, so their scores need not be computed.

    Σ_j [j ∈ S_i] κ_ij v_j = Σ_{j∈S_i} κ_ij v_j: a sparse head costs the pairs that its pattern keeps.
    """

    name = "only the pattern's pairs"
    identity = "Σ_j [j ∈ S_i] κ_ij v_j = Σ_{j∈S_i} κ_ij v_j"
    identity_latex = r"\sum_j [j\in S_i]\,\kappa_{ij}v_j=\sum_{j\in S_i}\kappa_{ij}v_j"

    @staticmethod
    def refusal(primal: Primal) -> str | None:
        if form_of(primal).subset != "pattern":
            return "no pattern says which keys a query sees"
        return None


class GroupHeadsByScale(Rewrite):
    """Heads of one scale have equally many keys and run as one call.

    The heads of Eqn. primal-model-mha are independent regressions, so they may be solved in any grouping.
    """

    name = "heads grouped by scale"
    identity = "heads with equal s run as one batch of length ⌈N/s⌉"
    identity_latex = r"\{f^h : s_h=s\}\ \text{run as one batch of length}\ \lceil N/s\rceil"

    @staticmethod
    def refusal(primal: Primal) -> str | None:
        if form_of(primal).points == "tokens":
            return "all heads have the same keys, and run as one call already"
        return None

    @staticmethod
    def groups(scales: tuple[int, ...]) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """(scale, heads) for each distinct scale, ascending."""
        return tuple((s, tuple(h for h, own in enumerate(scales) if own == s)) for s in sorted(set(scales)))


REWRITES: tuple[type[Rewrite], ...] = (
    GateAfterSum, RowConstantsCancel, NormsOfKeysAreBias, PoolBeforeProjection, Reassociate, KeepPattern,
    GroupHeadsByScale,
)  # fmt: skip
