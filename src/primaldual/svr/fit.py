"""Fit a primal layer to data: the paper's support vector regression, solved and certified."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..dual.form import knows_positions
from ..ops import checks
from ..primal import Primal, as_primal
from ..primal._spec import is_number
from .arguments import check_tensors, designed, four_d
from .certificate import Certificate, certificate_of
from .design import Design
from .regressions import Regressions, unit_of
from .solver import FLOAT32_GAP, solve

LEAST_GAP = 1e-7
LEAST_RESIDUAL = 1e-6
"""What no fit warns of: float64 often comes to less, but not with every kernel."""


class KernelError(ValueError):
    """The kernel matrix is not finite or not positive semi-definite, so there is no such regression."""


class NotConvergedWarning(UserWarning):
    """The solver's steps did not suffice; the certificate says how far they came."""


@dataclass(frozen=True)
class Fit:
    """A solved regression. Shapes have the leading dimensions of the keys; W is the most points a head has.

    alpha, alpha_tilde: the dual variables [..., W, Dv], α·α̃ = 0.
    bias: b [..., Dv].
    values: v = (α − α̃)/h(k) [..., W, Dv], what attention calls the values.
    support: which points are support vectors for any output [..., W].
    seen: which points are there [..., W]; pooled heads are padded to the longest.
    """

    primal: Primal
    alpha: Tensor
    alpha_tilde: Tensor
    bias: Tensor
    values: Tensor
    support: Tensor
    seen: Tensor
    iterations: int
    certificate: Certificate
    C: Tensor
    epsilon: float
    design: Design
    leading: tuple[int, ...]

    @property
    def prices(self) -> Tensor:
        """What a deviation of each point costs, w_j C [..., W]."""
        w = self.design.log_w
        c = self.C.unsqueeze(-1).expand(self.seen.shape)
        return c if w is None else c * w.exp().reshape(self.seen.shape)

    def predict(
        self, x: Tensor, by: Literal["dual", "primal"] = "dual", *, query_offset: int = 0, gate: Tensor | None = None
    ) -> Tensor:
        """f at the points x [..., L, D].

        Args:
            x: queries; token maps of the primal see them as one sequence.
            query_offset: the place of the first of them in the sequence of keys, which matters where a part of the
                primal knows positions: f is then a function of (position, point).
            by: "dual", the expansion Σ_j κ(Tx, Tk_j)/h(Tx) v_j + b, which is attention with these values; or
                "primal", W Φ(Tx)/h(Tx) + b with W written out, for a finite Φ.
            gate: g at these points [..., L], of a primal with a gate for each head; 1/2 where it is not given, as it
                starts.
        """
        if self.design.gate is None and gate is not None:
            raise ValueError(f"gate: {self.primal!r} has no gate on its normalizer")
        g = None
        if self.design.gate is not None:
            g = x.new_full(x.shape[:-1], 0.5) if gate is None else gate
            if g.shape != x.shape[:-1]:
                raise ValueError(f"gate must be {list(x.shape[:-1])}, a number for every point; got {list(g.shape)}")
            g = four_d(g.unsqueeze(-1), self.leading, "gate").to(self.values.dtype).squeeze(-1)
        x = four_d(x, self.leading, "x").to(self.values.dtype)
        checks.query_offset(query_offset, self.primal.mixing_maps)
        places = torch.arange(x.shape[2], device=x.device) + query_offset
        x = self.primal.on_tokens(x, places, self.design.parameters)
        weights = self.design.weights(x, places, g)
        values = self.values.reshape(*self.design.keys.shape[:2], *self.values.shape[-2:])
        bias = self.bias.reshape(*self.design.keys.shape[:2], 1, -1)
        if by == "dual":
            out = weights @ values + bias
        elif by == "primal":
            out = self._through_w(x, values)
            out = (out if g is None else out * g.unsqueeze(-1)) + bias
        else:
            raise ValueError(f"by must be 'dual' or 'primal', got {by!r}")
        return out.reshape(self.leading + tuple(out.shape[-2:]))

    def _through_w(self, x: Tensor, values: Tensor) -> Tensor:
        """W Φ(Tx)/h(Tx), W = Σ_j (α_j − α̃_j) Φ(Tk_j)ᵀ/h(k_j)."""
        primal, parameters = self.design.primal, self.design.parameters
        if not primal.features.finite or knows_positions(primal.features):
            raise ValueError(
                f"{primal.features!r} has infinitely many features, so W cannot be written out; use by='dual'"
            )
        x, keys = self.design.mapped(x)
        phi_x, phi_k = (primal.features.map(t, parameters) for t in (x, keys))
        phi_k = phi_k.where(self.design.visible.unsqueeze(-1), 0.0)
        if self.design.log_w is not None:  # w_j κ = Φ(x)·w_jΦ(k_j)
            phi_k = phi_k * self.design.log_w.exp().unsqueeze(-1)
        weight = phi_k.transpose(-1, -2) @ values  # v_j = (α_j − α̃_j)/h(k_j): [B, H, D_φ, Dv]
        h = primal.normalizer.at(x, phi_x @ phi_k.sum(-2).unsqueeze(-1), parameters)
        return phi_x @ weight / h


def fit(
    primal: Primal | str,
    keys: Tensor,
    targets: Tensor,
    *,
    C: float | Tensor,
    epsilon: float,
    bias: bool = False,
    key_padding_mask: Tensor | None = None,
    query: int | None = None,
    is_causal: bool = False,
    parameters: Mapping[str, Tensor] | None = None,
    tol: float = 1e-14,
    max_iter: int = 2000,
) -> Fit:
    """Solve Eqn. primal-opt: fit W (and b) to the pairs (k_j, y_j), for every head and output at once.

    Args:
        primal: the layer, or a mechanism's name.
        keys: [..., N, D]; the last leading dimension is the heads.
        targets: [..., N, Dv]; for pooled heads per token, and pooled like the keys.
        C: the price of a deviation, a number or a tensor over the leading dimensions.
        epsilon: the half-width of the tube.
        bias: fit b too, under the centring constraint Σ(α − α̃) = 0.
        key_padding_mask: boolean [..., N] without the heads; keys that are True take no part.
        query: of a sparse or causal head, the query whose regression is meant.
        is_causal: the training set of query i is what it may see.
        parameters: what the primal learns, by name.
        tol: the relative duality gap to reach; in units where K and the objectives are of order 1, f is then off by
            about √(2 tol), at and away from the keys. Under 1e-6 every point meets the optimality conditions, too.
        max_iter: steps at most, ADMM's (never more than 200) and the interior-point method's (40); a fit that they do
            not suffice for warns, and its certificate says how good it is.

    >>> keys, targets = torch.randn(2, 4, 20, 8), torch.randn(2, 4, 20, 3)
    >>> solved = fit("softmax", keys, targets, C=1e3, epsilon=0.1)
    >>> solved.certificate.ok(1e-6), solved.predict(torch.randn(2, 4, 5, 8)).shape
    (True, torch.Size([2, 4, 5, 3]))
    """
    check_tensors(keys, "targets", targets, key_padding_mask)
    leading = tuple(keys.shape[:-2])
    if not (is_number(epsilon) and math.isfinite(epsilon) and epsilon >= 0):
        raise ValueError(f"epsilon must be a finite number of at least 0, got {epsilon!r}")
    if not (isinstance(C, Tensor) or is_number(C)):
        raise TypeError(f"C must be a number or a tensor, got {C!r}")
    c = torch.as_tensor(C, dtype=torch.float64, device=keys.device)
    if not bool((c > 0).all()):
        raise ValueError(f"C must be positive, got {C!r}")
    if c.dim() > len(leading) or any(n not in (1, m) for n, m in zip(c.shape[::-1], leading[::-1], strict=False)):
        raise ValueError(f"C must be a number, or have the leading dimensions {list(leading)}; got {list(c.shape)}")
    primal = as_primal(primal)
    made = designed(primal, keys, "targets", targets, key_padding_mask, query, is_causal, parameters)
    batch, heads, points, _ = made.keys.shape
    problems = batch * heads
    if not bool(made.kernel.isfinite().all()):
        raise KernelError("the kernel matrix is not finite: h is zero or the features overflow")
    check_definite(made.kernel)
    seen = made.visible.reshape(problems, points, 1)
    values = made.targets.reshape(problems, points, -1)
    log_scale = made.log_scale.reshape(problems, 1, 1)
    log_c = c.expand(leading).reshape(-1, 1, 1).log()
    unit = unit_of(values, epsilon, log_scale, log_c)
    log_w = None if made.log_w is None else made.log_w.reshape(problems, points, 1)
    log_c = log_c if log_w is None else log_c + log_w  # a point of weight w costs w C
    p = Regressions(
        made.kernel.reshape(problems, points, points) * (log_scale - unit.log_kernel).exp(), values / unit.target,
        (log_c + unit.log_kernel).exp() / unit.target, epsilon / unit.target, seen, seen.double(), bias,
    )  # fmt: skip
    solution = solve(p, tol, max_iter)
    certificate = certificate_of(p, solution.beta, solution.bias, leading)
    _warn(certificate, solution.iterations, tol)
    log_dual = unit.target.log() - unit.log_kernel
    natural = solution.beta * log_dual.exp()
    log_v = log_dual - made.log_h.reshape(problems, points, 1)
    log_v = log_v if log_w is None else log_v - log_w
    v = torch.where(solution.beta == 0, 0.0, solution.beta * log_v.exp())
    v = (v * made.sign_h.reshape(problems, points, 1)).where(p.seen, 0.0)

    def shaped(x: Tensor) -> Tensor:
        return x.reshape(leading + tuple(x.shape[1:]))

    return Fit(
        primal=primal, alpha=shaped(natural.clamp(min=0)), alpha_tilde=shaped((-natural).clamp(min=0)),
        bias=shaped((solution.bias * unit.target).squeeze(1)), values=shaped(v),
        support=shaped((solution.beta != 0).any(-1)),
        seen=shaped(p.seen.squeeze(-1)), iterations=solution.iterations,
        certificate=certificate, C=c.expand(leading), epsilon=float(epsilon),
        design=made, leading=leading,
    )  # fmt: skip


def _warn(certificate: Certificate, steps: int, tol: float) -> None:
    """Warn where the certificate is not good to the tolerance that was asked for."""
    gap, residual = (float(x.detach().max()) for x in (certificate.gap, certificate.residual))
    # a gap of FLOAT32_GAP or more is reached without the active set, and says nothing of single points
    least = max(math.sqrt(2 * tol), LEAST_RESIDUAL) if tol < FLOAT32_GAP else math.inf
    if gap <= max(tol, LEAST_GAP) and residual <= least:  # a NaN is not
        return
    condition = float(certificate.condition.detach().max())
    warnings.warn(
        f"relative duality gap {gap:.1e}, asked for {tol:.1e}, and residuals of the optimality conditions up to "
        f"{residual:.1e} after {steps} steps; lower C, or see the certificate (condition number up to {condition:.1e})",
        NotConvergedWarning,
        stacklevel=3,
    )


def check_definite(kernel: Tensor) -> None:
    """Raise unless every kernel is positive semi-definite, up to rounding."""
    diagonal = kernel.diagonal(dim1=-2, dim2=-1)
    d = diagonal.clamp(min=0).sqrt().where(diagonal > 0, 1.0)
    unit = kernel / (d.unsqueeze(-1) * d.unsqueeze(-2))
    lifted = unit + 1e-8 * torch.eye(kernel.shape[-1], dtype=kernel.dtype, device=kernel.device)
    if bool((diagonal < 0).any()) or bool((torch.linalg.cholesky_ex(lifted).info > 0).any()):
        lowest = float(torch.linalg.eigvalsh(unit).min())
        raise KernelError(
            f"the kernel matrix is not positive semi-definite (smallest eigenvalue {lowest:.1e} at unit diagonal): "
            f"it is no Φ(x)·Φ(y)"
        )
