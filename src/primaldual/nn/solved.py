"""Attention whose dual variables are solved for instead of learned."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import dropout, pad

from ..ops import checks, masks
from ..ops.layer import LayerProblem
from ..primal import AllKeys, Pooled, Primal, Sparse
from ..primal._spec import is_number
from ..svr.arguments import double
from ..svr.design import Design, PerQueryError, design
from ..svr.implicit import ridge, support_vectors, values_of
from .multihead import MultiheadAttention
from .projection import ConvProjection

Loss = Literal["epsilon-insensitive", "squared"]


class SolvedAttention(MultiheadAttention):
    """Multi-head attention that fits each head's regression to the sequence, instead of learning its solution.

    The projections are those of `MultiheadAttention`, but what the value projection gives are *targets* y_j. The
    dual variables β are the solution of the head's regression of these targets on the keys, and

        out_i = Σ_j κ(T q_i, T k_j)/h(T q_i) · v_j,   v_j = β_j/h(k_j).

    Its output is the prediction at the queries of a regression fitted at the keys. It always differs from
    `MultiheadAttention` with the same parameters: there v_j is a function of token j alone, here of all keys and
    targets of the sequence, and weights @ targets is not the output. Only where β is solved does the loss matter;
    with learned values every loss gives the same layer (representer theorem).

    Cost, for each head: one kernel of N × N and its factorisation, O(N³), with the squared loss; the same, the solver's
    steps of O(N² D_v) each, and two systems of the free points for each of the D_v outputs (one forward, one backward),
    O(N³ D_v) in all, with the ε-insensitive one. Attention itself is O(N² D). Everything between the projections is
    done in float64, whatever the dtype of the input.

    Gradients are exact: through the Cholesky factor, or by implicit differentiation at the solution (zero to the
    targets of an output none of whose points is free). Sparse heads, causality and attention masks are refused: each
    query would have a regression of its own.

    Args:
        embed_dim, num_heads, dropout, bias, kdim, vdim, batch_first, device, dtype, mechanism, projection: as in
            `MultiheadAttention`; `batch_first` is True here. Dropout acts on the weights of the prediction (on its
            entries for a finite Φ), never on the fit. With `Primal(bias=True)` b is learned, not solved.
        loss: "epsilon-insensitive", min ½|W|² + C Σ max(0, |y − f| − ε): sparse, |β| ≤ C. "squared", min ½|W|² +
            C/2 Σ (y − f)²: kernel ridge regression, β = (K + I/C)⁻¹ y.
        C: the price of a deviation; a large one interpolates the targets, a small one shrinks the output to zero. It
            counts in units where the largest diagonal entry of the head's K_ij = κ(Tk_i, Tk_j)/(h(k_i)h(k_j)) is 1, so
            that one C serves all lengths: `fit` takes C / max_j K_jj. Keys with a large h(k_j) have a small K_jj, and
            need a larger C to be fitted; keys of one length ("qk-norm") are all alike.
        epsilon: the half-width of the tube, in units of the targets; deviations within it cost nothing. Of the
            ε-insensitive loss alone.
        max_iter: steps of the ε-insensitive solver at most; a fit that needs more warns. A finite Φ with fewer features
            than there are points is slow to solve at a large C.

    >>> layer = SolvedAttention(64, 8, loss="squared", C=10.0, mechanism="bn")
    >>> x = torch.randn(2, 20, 64)
    >>> layer(x, x, x, need_weights=False)[0].shape
    torch.Size([2, 20, 64])
    """

    learns_values = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        loss: Loss = "epsilon-insensitive",
        C: float = 10.0,
        epsilon: float = 0.1,
        max_iter: int = 2000,
        mechanism: str | Primal = "softmax",
        projection: Literal["linear", "shared"] | ConvProjection = "linear",
        dropout: float = 0.0,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            embed_dim, num_heads, dropout, bias, False, False, kdim, vdim, batch_first, device, dtype,
            mechanism=mechanism, projection=projection,
        )  # fmt: skip
        if loss not in get_args(Loss):
            raise ValueError(f"loss must be one of {', '.join(map(repr, get_args(Loss)))}; got {loss!r}")
        if not (is_number(C) and 0 < C < math.inf):
            raise ValueError(f"C must be a positive finite number, got {C!r}")
        if not (is_number(epsilon) and 0 <= epsilon < math.inf):
            raise ValueError(f"epsilon must be a finite number of at least 0, got {epsilon!r}")
        if isinstance(max_iter, bool) or not isinstance(max_iter, int) or max_iter < 1:
            raise ValueError(f"max_iter must be an integer of at least 1, got {max_iter!r}")
        if isinstance(self.primal.training_set, Sparse):
            raise PerQueryError(
                f"{self.primal.training_set!r} gives each query a training set of its own, so there is a regression "
                f"per query and no values to solve for; use MultiheadAttention, or a mechanism that is not sparse"
            )
        if self.made or self.primal.weights is not None:
            raise ValueError(
                f"{self.primal!r} has gates or weights for single tokens, by which the regression at the keys and the "
                f"function at the queries are not of one layer's making; use MultiheadAttention"
            )
        self.loss: Loss = loss
        self.C, self.epsilon, self.max_iter = float(C), float(epsilon), max_iter

    def extra_repr(self) -> str:
        tube = f", epsilon={self.epsilon:g}" if self.loss == "epsilon-insensitive" else ""
        return f"{super().extra_repr()}, loss={self.loss!r}, C={self.C:g}{tube}"

    def _attend(self, problem: LayerProblem) -> tuple[Tensor, Tensor | None]:
        if problem.is_causal or problem.mask is not None:
            raise PerQueryError(
                f"{'is_causal=True' if problem.is_causal else 'attn_mask'} gives each query a training set of its own, "
                f"so there is a regression per query and no values to solve for; key_padding_mask is taken"
            )
        x, query_padding, hidden = problem.x, problem.query_padding, _hidden(problem.padding)
        projected = self.project(x, problem.key, problem.value, hidden, query_padding)
        kind = x.device.type
        with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext():
            heads, weights = self._fit(problem, projected, hidden)
        kept = projected[0].dtype
        return heads.to(kept), None if weights is None else weights.to(kept)

    def _fit(
        self, problem: LayerProblem, projected: tuple[Tensor, Tensor, Tensor], hidden: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Head outputs and weights in float64, from the projections [N, L, E]."""
        query_padding = problem.query_padding
        queries, keys, targets = (self.split(t).double() for t in projected)
        if keys.shape[2] == 0:  # no keys at all: one that is hidden, so that every query sees none
            keys, targets = pad(keys, (0, 0, 0, 1)), pad(targets, (0, 0, 0, 1))
            hidden = torch.ones(keys.shape[0], 1, dtype=torch.bool, device=keys.device)
        parameters = double(dict(problem.parameters))
        made = design(self.primal, keys, targets, hidden, None, False, parameters)
        values = values_of(made, self.solve(made))
        checks.query_offset(problem.query_offset, self.primal.mixing_maps)
        if self.primal.mixing_maps:
            queries = masks.without_padding(queries, query_padding)
        places = torch.arange(queries.shape[2], device=queries.device) + problem.query_offset
        queries = self.primal.on_tokens(queries, places, parameters)
        # a query that sees no key gets zeros
        weights = made.weights(queries, places).where(made.visible.any(-1)[..., None, None], 0.0)
        p = problem.dropout_p
        finite = self.primal.features.finite  # as in `attention`: a finite Φ drops entries of the output
        weights = weights if finite else dropout(weights, p)
        heads = weights @ values
        heads = dropout(heads, p) if finite else heads
        if not problem.need_weights:
            return heads, None
        return heads, self._over_tokens(weights, keys, hidden, parameters)[..., : problem.key.shape[1]]

    def solve(self, made: Design) -> Tensor:
        """β [batch, heads, points, D_v] of every head's regression, in scaled units."""
        if not made.targets.numel():  # an empty batch
            return made.targets
        if self.loss == "squared":
            return ridge(made.kernel, made.targets, self.C)
        kernel, targets, seen = (t.flatten(0, 1) for t in (made.kernel, made.targets, made.visible.unsqueeze(-1)))
        beta = support_vectors(kernel, targets, self.C, self.epsilon, seen, max_iter=self.max_iter)
        return beta.unflatten(0, made.visible.shape[:2])

    def _over_tokens(
        self, weights: Tensor, keys: Tensor, hidden: Tensor | None, parameters: dict[str, Tensor]
    ) -> Tensor:
        """A window's weight is shared by its tokens: [batch, heads, L, points] to [batch, heads, L, S]."""
        pooling = self.primal.training_set
        if type(pooling) is AllKeys:
            return weights
        if isinstance(pooling, Pooled) and pooling.how in ("max", "conv"):
            raise ValueError(f"{pooling.how} pooling has no weights over tokens; give need_weights=False")
        tokens = keys.shape[2]
        shares = torch.eye(tokens, dtype=keys.dtype, device=keys.device).expand(*keys.shape[:2], tokens, tokens)
        # pooled like targets, a token's indicator is its share of each point
        return weights @ design(replace(self.primal, bias=False), keys, shares, hidden, None, False, parameters).targets


def _hidden(padding: Tensor | None) -> Tensor | None:
    """True where a token is padding; a finite bias on keys has no place in a symmetric kernel."""
    if padding is None or padding.dtype == torch.bool:
        return padding
    hidden = padding == -torch.inf
    if bool((padding.masked_fill(hidden, 0.0) != 0).any()):
        raise ValueError(
            "a float key_padding_mask must be 0 or −inf here: a bias on keys alone makes the kernel of the regression "
            "asymmetric"
        )
    return hidden
