"""How good a solution is: objectives, duality gap, and the four optimality conditions, each a number per problem."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .regressions import Regressions, deviation, objectives, off_centre, relative_gap


@dataclass(frozen=True)
class Certificate:
    """All [batch, heads] (leading dimensions as given). Objectives are sums over outputs; residuals are the worst.

    primal, dual: objectives of Eqn. primal-opt and its dual, in units where no K_jj, target or 1/C is over 1.
    gap: (primal − dual) / (1 + |primal| + |dual|), the worst output.
    primal_feasibility: by how much a prediction leaves the tube where its slack is not paid for, over the scale of y.
    dual_domain: by how much α or α̃ leaves [0, C], or the centring constraint is missed, over the scale of α.
    complementarity: α·(room in the tube) and (C − α)·slack, over the size of the objective.
    stationarity: distance of y − f from the subdifferential of ε|β| on the box, over the scale of y.
    condition, rank: of the kernel matrix, from its eigenvalues, which are found when they are asked for; rank counts
        those over N·eps of the largest.
    """

    primal: Tensor
    dual: Tensor
    gap: Tensor
    primal_feasibility: Tensor
    dual_domain: Tensor
    complementarity: Tensor
    stationarity: Tensor
    kernel: Tensor  # [..., W, W]
    seen: Tensor  # bool [..., W]

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        return spectrum(self.kernel, self.seen)

    @property
    def rank(self) -> Tensor:
        """How many eigenvalues of the kernel are not rounding."""
        return self._spectrum[0]

    @property
    def condition(self) -> Tensor:
        """Largest over smallest eigenvalue; infinite where the smallest is rounding."""
        return self._spectrum[1]

    @property
    def residual(self) -> Tensor:
        """The worst of the four residuals."""
        four = (self.primal_feasibility, self.dual_domain, self.complementarity, self.stationarity)
        return torch.stack(four).amax(0)

    def ok(self, tol: float = 1e-6) -> bool:
        """Whether the gap and all four residuals of every problem are within `tol`; a NaN never is."""
        return all(bool((x <= tol).all()) for x in (self.gap, self.residual))


def certificate_of(p: Regressions, beta: Tensor, bias: Tensor, leading: tuple[int, ...]) -> Certificate:
    """Measure a solution of scaled problems from scratch: nothing is taken over from the solver."""
    primal, dual = objectives(p, beta, bias)
    residual, slack = deviation(p, p.kernel @ beta, bias)
    size = beta.abs()
    scale = torch.maximum(p.targets.abs().amax((1, 2), keepdim=True), p.epsilon).clamp(min=1e-300)
    c = p.c.clamp(max=torch.finfo(beta.dtype).max)
    spread = size.amax((1, 2), keepdim=True).clamp(min=1e-300)
    at_bound = size >= c * (1 - 1e-9)
    feasibility = slack.where(~at_bound, 0.0) / scale
    domain = torch.maximum(((size - c).clamp(min=0) / spread).amax((1, 2)), off_centre(p, beta).amax(-1))
    room = (p.epsilon + slack - residual * beta.sign()).abs()
    paid = (c - size).clamp(max=spread * 1e3) * slack
    worth = 1 + primal.abs().unsqueeze(1)
    complementarity = torch.maximum(size * room, paid) / worth
    push = residual * beta.sign() - p.epsilon  # along β: zero when free, positive at the bound
    stationary = torch.where(size == 0, slack, torch.where(at_bound, (-push).clamp(min=0), push.abs()))
    worst = [x.amax((1, 2)) for x in (feasibility, complementarity, stationary / scale)]
    numbers = (primal.sum(-1), dual.sum(-1), relative_gap(p, beta, bias).amax(-1), worst[0], domain, worst[1], worst[2])
    shaped = (x.reshape(leading + tuple(x.shape[1:])) for x in (*numbers, p.kernel, p.seen.squeeze(-1)))
    return Certificate(*shaped)


def spectrum(kernel: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """(rank, condition number) of each kernel over the points that exist."""
    eigenvalues = torch.linalg.eigvalsh(kernel).clamp(min=0)  # ascending
    count = seen.sum(-1)
    largest = eigenvalues[..., -1]
    # points that are not there add zero eigenvalues, which sort first among those of a semi-definite matrix
    order = torch.arange(eigenvalues.shape[-1], device=eigenvalues.device)
    own = order >= (eigenvalues.shape[-1] - count).unsqueeze(-1)
    floor = largest * torch.finfo(eigenvalues.dtype).eps * count
    rank = ((eigenvalues > floor.unsqueeze(-1)) & own).sum(-1)
    smallest = eigenvalues.masked_fill(~own, torch.inf).amin(-1)
    condition = torch.where(smallest > floor / 10, largest / smallest, torch.inf)
    return rank, torch.where(count > 0, condition, 1.0)
