"""The other way: which regression does a head with these keys and values solve?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..dual import form_of
from ..dual.form import pooling_of
from ..primal import Primal, as_primal
from ..svr.arguments import check_tensors, designed
from ..svr.certificate import spectrum
from ..svr.fit import check_definite


class Recovered(NamedTuple):
    """The regression that a head solves. Leading dimensions as given; W is the most points a head has.

    alpha: α − α̃ = v·h(k) [..., W, Dv]; may be infinite where h leaves float64, log_C then still says how large.
    C, log_C: the smallest price at which this α is allowed [...].
    targets: y = Kα + ε·sign(α), per token [..., N, Dv], as `fit` takes them.
    seen: which points are there [..., W].
    rank, condition: of the kernel matrix; α is unique when rank equals the number of points.
    """

    alpha: Tensor
    C: Tensor
    log_C: Tensor
    targets: Tensor
    epsilon: float
    seen: Tensor
    rank: Tensor
    condition: Tensor

    @property
    def unique(self) -> Tensor:
        """Whether these values are the only ones with this function, for each head."""
        return self.rank == self.seen.sum(-1)


def recover(
    primal: Primal | str,
    keys: Tensor,
    values: Tensor,
    *,
    epsilon: float,
    key_padding_mask: Tensor | None = None,
    query: int | None = None,
    is_causal: bool = False,
    parameters: Mapping[str, Tensor] | None = None,
) -> Recovered:
    """Name the regression whose support vector expansion is this head.

    Any v is optimal for some data: with α = v·h(k), C the largest |α| and y = Kα + ε·sign(α), every optimality
    condition holds. `fit` on these targets gives the head's function back.

    Args:
        primal, keys, key_padding_mask, query, is_causal, parameters: as in `fit`.
        values: [..., N, Dv]; for pooled heads per token, and pooled like the keys.
        epsilon: the half-width of the tube; it shifts the targets, not the function.
    """
    primal = as_primal(primal)
    pooled = pooling_of(primal.training_set)
    if pooled is not None and pooled.how == "conv":
        raise ValueError("conv pooling mixes targets with learned weights, so targets per token do not follow from α")
    check_tensors(keys, "values", values, key_padding_mask)
    leading = tuple(keys.shape[:-2])
    made = designed(primal, keys, "values", values, key_padding_mask, query, is_causal, parameters)
    # α in scaled units, where it is of order 1: α = scaled · exp(−log_scale)
    log_alpha = made.targets.abs().log() + made.log_h.unsqueeze(-1) + made.log_scale[..., None, None]
    log_price = log_alpha - made.log_scale[..., None, None]  # of a point of weight 1
    log_alpha = log_alpha if made.log_w is None else log_alpha + made.log_w.unsqueeze(-1)
    sign = made.targets.sign() * made.sign_h.unsqueeze(-1)
    scaled = (sign * log_alpha.exp()).where(made.visible.unsqueeze(-1), 0.0)
    # y = Kα is the head's own output at its keys, which stays finite where the α of an exponential kernel does not
    exponential = form_of(primal).log_kernel
    y = made.weights(made.keys, made.places, made.gate) @ made.targets if exponential else made.kernel @ scaled
    y = (y + epsilon * sign).where(made.visible.unsqueeze(-1), 0.0)
    log_c = log_price.masked_fill(~made.visible.unsqueeze(-1), -torch.inf).amax((-1, -2))
    log_c = log_c.clamp(min=-700.0)  # a head whose values are all zero needs no price at all
    check_definite(made.kernel)
    rank, condition = spectrum(made.kernel, made.visible)

    def shaped(x: Tensor) -> Tensor:
        return x.reshape(leading + tuple(x.shape[2:]))

    return Recovered(
        alpha=shaped(scaled * (-made.log_scale[..., None, None]).exp()), C=shaped(log_c.exp()), log_C=shaped(log_c),
        targets=shaped(made.per_token(y)), epsilon=epsilon,
        seen=shaped(made.visible), rank=shaped(rank), condition=shaped(condition),
    )  # fmt: skip
