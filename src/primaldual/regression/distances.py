"""What `head_distance` found: distances by layer, averages, a table, a plot."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..base.packages import needed
from ..base.spread import Spread, spread
from .diagnosis import EXTRA

if TYPE_CHECKING:
    from rich.table import Table

    from .maps import Pooling


class LayerDistances(NamedTuple):
    """One call of a layer. Distances are [cases, heads, heads], in float64, symmetric, zero on the diagonal.

    layer: the module's name in the model; call: 0, or which call of a module that is used more than once.
    scales: the pooling of each head's keys.
    shared, repeated: the two ways for pooled heads, as `head_distance` says; the same where none is. No `shared` where
        the pooling has no weights to share, and then the note says so.
    """

    layer: str
    call: int
    scales: tuple[int, ...]
    shared: Tensor | None
    repeated: Tensor
    note: str = ""

    def pairs(self, pooling: Pooling) -> Spread | None:
        """Mean and standard deviation (n − 1) over cases and pairs of heads; None where there is no `shared`."""
        distances = self.shared if pooling == "shared" else self.repeated
        if distances is None:
            return None
        heads = len(self.scales)
        first, second = torch.triu_indices(heads, heads, offset=1)
        return spread(distances[:, first, second].flatten().tolist())


class Average(NamedTuple):
    """The layers of a model as one.

    mean: of the layers' means over cases and pairs of heads.
    std: the standard deviation (n − 1) of these means; None for a single layer.
    std_within: the mean of the layers' standard deviations over cases and pairs; None for a single distance.
    """

    mean: float
    std: float | None
    std_within: float | None


@dataclass(frozen=True, repr=False, eq=False)
class HeadDistances:
    """Distances between the heads of a model, in the order of the forward pass. Print it for the table.

    Each call of a module that is used more than once is a layer. Layers of one head are left out.
    """

    layers: tuple[LayerDistances, ...]

    @property
    def shared(self) -> Average | None:
        """With a window's weight shared by its tokens; None where a layer has no such weights."""
        return self._average("shared")

    @property
    def repeated(self) -> Average:
        """With a window's weight repeated for its tokens."""
        found = self._average("repeated")
        assert found is not None
        return found

    def _average(self, pooling: Pooling) -> Average | None:
        layers = [layer.pairs(pooling) for layer in self.layers]
        if None in layers:
            return None
        means = spread([layer.mean for layer in layers if layer])
        within = [layer.std for layer in layers if layer and layer.std is not None]
        return Average(means.mean, means.std, fmean(within) if len(within) == len(layers) else None)

    def named(self) -> dict[str, LayerDistances]:
        """The layers by name; of a module that is used more than once, its calls."""
        repeated = {layer.layer for layer in self.layers if layer.call}
        return {
            f"{layer.layer}, call {layer.call}" if layer.layer in repeated else layer.layer: layer
            for layer in self.layers
        }

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types: averages, and for each layer the means over the cases."""
        shared = self.shared
        return {
            "shared": None if shared is None else shared._asdict(),
            "repeated": self.repeated._asdict(),
            "layers": [_plain(layer) for layer in self.layers],
        }

    def table(self) -> Table:
        """For a terminal."""
        from rich.text import Text

        from ..base.terminal import titled

        notes = [f"{name}: {layer.note}" for name, layer in self.named().items() if layer.note]
        caption = "mean ± standard deviation: of a layer over pairs of heads and cases, then over layers"
        table = titled("L2 distance between the attention maps of two heads")
        table.caption, table.caption_justify = Text("\n".join([caption, *notes])), "left"
        table.add_column("layer", style="bold cyan", overflow="fold")
        for heading in ("heads", "scales", "cases", "shared", "repeated"):
            table.add_column(heading, justify="right", no_wrap=True)
        for name, layer in self.named().items():
            table.add_row(
                name, str(len(layer.scales)), ", ".join(map(str, dict.fromkeys(layer.scales))),
                str(len(layer.repeated)), _text(layer.pairs("shared")), _text(layer.pairs("repeated")),
                end_section=layer is self.layers[-1],
            )  # fmt: skip
        table.add_row("all layers", "", "", "", _text(self.shared), _text(self.repeated))
        return table

    def plot(self) -> bytes:
        """A PNG: distances between every two heads, a line for each layer, and the means beside."""
        needed("matplotlib", "matplotlib", "plot()", EXTRA)
        from .distance_plot import draw

        return draw(self)

    def __rich__(self) -> Table:
        return self.table()

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=80, color_system=None, force_terminal=False)
        with console.capture() as captured:
            console.print(self.table())
        return "\n".join(line.rstrip() for line in captured.get().splitlines()).strip("\n")

    def __repr__(self) -> str:
        shared, repeated = _text(self.shared), _text(self.repeated)
        return f"HeadDistances(layers={len(self.layers)}, shared={shared}, repeated={repeated})"


def _plain(layer: LayerDistances) -> dict[str, Any]:
    def found(pooling: Pooling, distances: Tensor | None) -> dict[str, Any] | None:
        pairs = layer.pairs(pooling)
        return None if distances is None or pairs is None else pairs._asdict() | {"heads": distances.mean(0).tolist()}

    return {
        "layer": layer.layer, "call": layer.call, "scales": list(layer.scales), "cases": len(layer.repeated),
        "shared": found("shared", layer.shared), "repeated": found("repeated", layer.repeated), "note": layer.note,
    }  # fmt: skip


def _text(found: Spread | Average | None) -> str:
    return "–" if found is None else Spread(found.mean, found.std).text(3)
