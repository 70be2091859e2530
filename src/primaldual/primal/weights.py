"""w, the weights of the points that a head is fitted to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ._spec import Spec
from .per_token import PerToken


@dataclass(frozen=True)
class PointWeights(Spec):
    """Base class: weights w_j ≥ 0, which multiply κ(x, k_j) in the sum and in h.

    They are those of a regression whose point j costs w_j C: α_j = w_j a_j with 0 ≤ a_j ≤ C, so that
    f(x) = Σ_j w_j κ(x, k_j) v_j / h(x) with h(x) = Σ_j w_j κ(x, k_j) and v_j = (a_j − ã_j)/h(k_j). A pooled point has
    the sum of the weights of its tokens. Only their ratios matter to f, since h is the kernel sum; a regression takes
    the weight of the heaviest point for 1.
    """

    def made(self, heads: int, value_dim: int) -> dict[str, PerToken]:
        """What a layer makes of its input, by name."""
        return {}

    def log_weights(self, made: Mapping[str, Tensor], hidden: Tensor | None, tokens: int) -> Tensor:
        """log w of every token, [batch or 1, heads or 1, tokens], which no later token changes; in any precision.

        `made` is by name, with a 1 for tokens where all are alike; `hidden` [batch, 1, tokens] is True at padding.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement log_weights(made, hidden, tokens)")

    def remarks(self, latex: bool = False) -> tuple[str, ...]:
        if latex:
            return (
                r"Points have weights, which extends the paper's $f$: point $j$ costs $w_jC$, so that "
                r"$\alpha_j=w_ja_j$ with $0\le a_j\le C$, and $w_j$ multiplies $\kappa(x,Tk_j)$ in the sum and in $h$.",
            )
        return (
            "Points have weights, which extends the paper's f: point j costs w_j C, so that α_j = w_j a_j with "
            "0 ≤ a_j ≤ C, and w_j multiplies κ(x, Tk_j) in the sum and in h.",
        )


@dataclass(frozen=True)
class Forget(PointWeights):
    """w_j = exp(−c_j), c_j = Σ_{t≤j} log f_t, f = σ(A x + a) of the layer's key input: the Forgetting Transformer

    Query i sees key j ≤ i decayed by all gates between them, exp(c_i − c_j) = ∏_{j<t≤i} f_t; c_i is the same for every
    key and cancels under `KernelSum`, so that the decay is a weight for each key. It extends the paper's f, whose
    points all weigh the same. Without causality all queries have these weights, which are largest at the end.

    `attention` takes log f ≤ 0 in `parameters` by the name "log_forget", [batch, heads, keys]; a layer makes it, one
    for each head. It starts at A = 0 and log f_t = −2^(−8(h+1)/H) in head h of H, the slopes of ALiBi: so heads begin
    with horizons of different lengths, and every causal head near softmax on its own. Tokens that are padding forget
    nothing.
    """

    def made(self, heads: int, value_dim: int) -> dict[str, PerToken]:
        rates = torch.tensor([2.0 ** (-8 * (head + 1) / heads) for head in range(heads)])
        return {"log_forget": PerToken("key", -rates.expm1().log(), _log_sigmoid)}

    def log_weights(self, made: Mapping[str, Tensor], hidden: Tensor | None, tokens: int) -> Tensor:
        log_forget = made["log_forget"].expand(-1, -1, tokens)
        if hidden is not None:
            log_forget = log_forget.masked_fill(hidden, 0.0)
        # where there is float64: differences of what has become large are what counts
        wide = torch.float32 if log_forget.device.type == "mps" else torch.float64
        return -log_forget.cumsum(-1, dtype=wide)

    def text(self, x: str = "x") -> str:
        return "w_j = exp(−Σ_{t≤j} log f_t)"

    def latex(self, x: str = "x") -> str:
        return r"w_j=\exp\Big(-\sum_{t\le j}\log f_t\Big)"


def _log_sigmoid(x: Tensor) -> Tensor:
    """In at least float32: what adds up over many tokens is not to be rounded to 16 bits."""
    return logsigmoid(x.to(torch.promote_types(x.dtype, torch.float32)))
