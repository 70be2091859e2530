"""The weights of many models as one matrix, a row each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..kernels.encoder import usable
from ..models import SeriesConfig, SeriesTransformer, build

ALIGNED = 16


class Stacked:
    """Members' parameters in one matrix [members, count], and views of it by name, [members, …].

    One matrix has one norm per row, one optimiser update, one copy. Where the members compute in another dtype than
    their weights are kept in, the views are of a second matrix in that dtype; norms' weights are used as they are, and
    those of a regression's head. Every parameter begins at a multiple of ALIGNED columns, and zeros fill the gaps:
    fast matrix products want it.

    Args:
        config: of every member.
        seeds: one per member: each starts with the weights that `build(config, seed)` has.
        device: where they live.
        kept: dtype of the weights.
        computed: dtype of the computation.
    """

    def __init__(
        self, config: SeriesConfig, seeds: Sequence[int], device: torch.device, kept: torch.dtype, computed: torch.dtype
    ) -> None:
        models = [build(config, seed) for seed in seeds]
        shapes = {name: p.shape for name, p in models[0].named_parameters()}
        # a target of hundreds has no decimals in bfloat16
        fine = ("norm", "head.") if config.task == "regression" else ("norm",)
        exact = [name for name in shapes if computed == kept or any(part in name for part in fine)]
        rough = [name for name in shapes if name not in exact]
        self.config = config
        self.fused = usable(device, computed)
        self._shapes = {name: shapes[name] for name in (*exact, *rough)}
        self.count = sum(shape.numel() for shape in shapes.values())
        columns = sum(_columns(shape) for shape in shapes.values())
        self.matrix = torch.zeros(len(models), columns, device=device, dtype=kept)
        for row, model in zip(self.matrix, models, strict=True):
            for name, view in self._split(list(self._shapes), row):
                view.copy_(model.get_parameter(name).detach())
        self.matrix.grad = torch.zeros_like(self.matrix)
        self._gap = torch.zeros(len(models), ALIGNED, device=device, dtype=computed)
        self.exact = sum(_columns(shapes[name]) for name in exact)
        self.rough = self.matrix[:, self.exact :].to(computed)
        self._groups = ((exact, self.matrix[:, : self.exact]), (rough, self.rough))
        self.views = {
            name: view.requires_grad_() for names, part in self._groups for name, view in self._split(names, part)
        }
        self.buffers = {
            name: torch.stack([model.get_buffer(name) for model in models]).to(device, kept)
            for name, _ in models[0].named_buffers()
            if not name.endswith("num_batches_tracked")
        }

    @property
    def members(self) -> int:
        """How many."""
        return self.matrix.shape[0]

    def _split(self, names: list[str], part: Tensor) -> Iterator[tuple[str, Tensor]]:
        """[…, columns] as tensors by name."""
        columns = part.detach().split([_columns(self._shapes[name]) for name in names], -1) if names else ()
        for name, x in zip(names, columns, strict=True):
            shape = self._shapes[name]
            yield name, x[..., : shape.numel()].unflatten(-1, shape)

    def gather(self, loss: Tensor) -> None:
        """Put the gradient of a loss into `matrix.grad`."""
        found = dict(zip(self.views, torch.autograd.grad(loss, list(self.views.values())), strict=True))
        assert self.matrix.grad is not None
        places = (self.matrix.grad[:, : self.exact], self.matrix.grad[:, self.exact :])
        for (names, _), place in zip(self._groups, places, strict=True):
            if names:
                place.copy_(torch.cat([x for name in names for x in self._whole(found[name].flatten(1))], 1))

    def _whole(self, x: Tensor) -> tuple[Tensor, ...]:
        """A parameter's columns, and the gap after them."""
        gap = -x.shape[1] % ALIGNED
        return (x, self._gap[:, :gap].to(x.dtype)) if gap else (x,)

    def refresh(self) -> None:
        """Bring the working copy up to date with the matrix."""
        if self.rough.numel():
            self.rough.copy_(self.matrix[:, self.exact :])

    def member(self, index: int) -> SeriesTransformer:
        """One member as a model of its own, on the CPU."""
        model = SeriesTransformer(self.config).to(self.matrix.dtype)
        state = dict(self._split(list(self._shapes), self.matrix[index].cpu()))
        state |= {name: x[index].cpu() for name, x in self.buffers.items()}
        model.load_state_dict(state, strict=False)
        return model.eval()


def _columns(shape: torch.Size) -> int:
    return -(-shape.numel() // ALIGNED) * ALIGNED
