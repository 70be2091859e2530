"""The weights of many models as one matrix, a row each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from ..kernels.encoder import usable

ALIGNED = 16


class Stacked:
    """Members' parameters in one matrix [members, count], and views of it by name, [members, …].

    One matrix has one norm per row, one optimiser update, one copy. Where the members compute in another dtype than
    their weights are kept in, the views are of a second matrix in that dtype, the reduced one; only what is named
    precise is used as it is kept. Every parameter begins at a multiple of ALIGNED columns, and zeros fill the gaps:
    fast matrix products want it. Parameters without gradients are held with the buffers.

    Args:
        models: one per member, on the CPU with their initial weights; all alike but for those.
        device: where they live.
        kept: dtype of the weights.
        computed: dtype of the computation.
        precise: parts of the names of parameters and buffers that are used in the dtype that they are kept in.
        left_out: ends of the names of buffers that nothing is computed with.
    """

    def __init__(
        self, models: Sequence[nn.Module], device: torch.device, kept: torch.dtype, computed: torch.dtype,
        precise: Sequence[str] = (), left_out: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        def is_precise(name: str) -> bool:
            return computed == kept or any(part in name for part in precise)

        shapes = {name: p.shape for name, p in models[0].named_parameters() if p.requires_grad}
        if not shapes:
            raise ValueError(f"{type(models[0]).__name__} has no parameter to train")
        exact = [name for name in shapes if is_precise(name)]
        others = [name for name in shapes if not is_precise(name)]
        self.fused = usable(device, computed)
        self.generator = generator_of(device)
        self._shapes = {name: shapes[name] for name in (*exact, *others)}
        self.count = sum(shape.numel() for shape in shapes.values())
        columns = sum(_columns(shape) for shape in shapes.values())
        self.matrix = torch.zeros(len(models), columns, device=device, dtype=kept)
        for row, model in zip(self.matrix, models, strict=True):
            for name, view in self.named(row):
                view.copy_(model.get_parameter(name).detach())
        self.matrix.grad = torch.zeros_like(self.matrix)
        self._gap = torch.zeros(len(models), ALIGNED, device=device, dtype=computed)
        self.exact = sum(_columns(shapes[name]) for name in exact)
        self.reduced = self.matrix[:, self.exact :].to(computed)
        self._groups = ((exact, self.matrix[:, : self.exact]), (others, self.reduced))
        self.parameters = {
            name: view.requires_grad_() for names, part in self._groups for name, view in self._split(names, part)
        }
        held = {name: x.detach() for name, x in _untrained(models[0]).items() if not name.endswith(left_out or "\0")}
        self.buffers = {
            name: torch.stack([_untrained(model)[name].detach() for model in models]).to(
                device, (kept if is_precise(name) else computed) if x.is_floating_point() else x.dtype
            )
            for name, x in held.items()
        }

    @property
    def members(self) -> int:
        """How many."""
        return self.matrix.shape[0]

    def named(self, matrix: Tensor) -> Iterator[tuple[str, Tensor]]:
        """A tensor […, count], such as the gradient, as views by the name of the parameter."""
        return self._split(list(self._shapes), matrix)

    def columns(self, wanted: Callable[[str, torch.Size], bool]) -> Tensor:
        """[columns], boolean: those of the parameters that are wanted, by name and shape."""
        found = torch.zeros(self.matrix.shape[1], dtype=torch.bool)
        for name, view in self.named(found):
            view.fill_(wanted(name, self._shapes[name]))
        return found.to(self.matrix.device)

    def _split(self, names: list[str], part: Tensor) -> Iterator[tuple[str, Tensor]]:
        columns = part.detach().split([_columns(self._shapes[name]) for name in names], -1) if names else ()
        for name, x in zip(names, columns, strict=True):
            shape = self._shapes[name]
            yield name, x[..., : shape.numel()].unflatten(-1, shape) if shape else x[..., 0]

    def gather(self, loss: Tensor, add: bool = False) -> None:
        """Put the gradient of a loss of all members into `matrix.grad`, or add it."""
        self._place(self._gradients(loss, self.parameters), slice(None), add)

    def gather_member(self, loss: Tensor, parameters: dict[str, Tensor], member: int, add: bool = False) -> None:
        """The same for one member alone, whose parameters are those of `of_member`."""
        with_members = {name: x.unsqueeze(0) for name, x in self._gradients(loss, parameters).items()}
        self._place(with_members, slice(member, member + 1), add)

    @staticmethod
    def _gradients(loss: Tensor, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(parameters, found, strict=True))

    def _place(self, found: dict[str, Tensor], rows: slice, add: bool) -> None:
        assert self.matrix.grad is not None
        places = (self.matrix.grad[rows, : self.exact], self.matrix.grad[rows, self.exact :])
        for (names, _), place in zip(self._groups, places, strict=True):
            if names:
                whole = torch.cat([x for name in names for x in self._whole(found[name].flatten(1))], 1)
                place.add_(whole) if add else place.copy_(whole)

    def _whole(self, x: Tensor) -> tuple[Tensor, ...]:
        """A parameter's columns, and the gap after them."""
        gap = -x.shape[1] % ALIGNED
        return (x, self._gap[: len(x), :gap].to(x.dtype)) if gap else (x,)

    def of_member(self, member: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """A member's own parameters, leaves in the same memory, and its buffers."""
        parameters = {name: x.detach()[member].requires_grad_() for name, x in self.parameters.items()}
        return parameters, {name: x[member] for name, x in self.buffers.items()}

    def refresh(self) -> None:
        """Bring the reduced copy up to date with the matrix."""
        if self.reduced.numel():
            self.reduced.copy_(self.matrix[:, self.exact :])

    def load_into(self, model: nn.Module, member: int) -> nn.Module:
        """A member's weights in a model of its own, on the CPU, ready to predict."""
        state = dict(self.named(self.matrix[member].cpu())) | {
            name: x[member].cpu() for name, x in self.buffers.items()
        }
        model.to(self.matrix.dtype).load_state_dict(state, strict=False)
        return model.eval()


def generator_of(device: torch.device) -> torch.Generator:
    """What members draw from: one of their own on the CPU; on a GPU the device's, which its graphs know."""
    if device.type != "cuda":
        return torch.Generator()
    torch.cuda.init()  # before that it has no generators
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def _untrained(model: nn.Module) -> dict[str, Tensor]:
    """Buffers, and parameters without gradients."""
    return dict(model.named_buffers()) | {name: p for name, p in model.named_parameters() if not p.requires_grad}


def _columns(shape: torch.Size) -> int:
    return -(-shape.numel() // ALIGNED) * ALIGNED
