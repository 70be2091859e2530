"""Batched Cholesky solves with matrices that are positive definite but for rounding."""

from __future__ import annotations

import torch
from torch import Tensor


class Factored:
    """A system [..., N, N] and its Cholesky factor, with a lift of the size of rounding, as much as each one needs."""

    def __init__(self, system: Tensor) -> None:
        lift = torch.full_like(system[..., :1, 0], 1e-14)
        eye = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device)
        for _ in range(4):
            factor, info = torch.linalg.cholesky_ex(system + lift.unsqueeze(-1) * eye)
            failed = (info > 0).unsqueeze(-1)
            if not bool(failed.any()):
                break
            lift = torch.where(failed, lift * 1e2, lift)
        self.system, self.factor, self.failed = system, factor, failed.unsqueeze(-1)

    def solve(self, right: Tensor) -> Tensor:
        """x with system · x = right [..., N, R], refined twice against the lift; zero where there is no factor."""
        x = torch.cholesky_solve(right, self.factor)
        for _ in range(2):
            x = x + torch.cholesky_solve(right - self.system @ x, self.factor)
        return torch.where(self.failed, 0.0, x).nan_to_num()
