"""Head redundancy beside what the paper prints (Table head_distance)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from ..base.spread import spread, spread_text
from ..regression import HeadDistances, head_distance
from . import render
from .render import Grid

NAME = "table-head-distance"


class Printed(NamedTuple):
    """Layer-average mean and standard deviation of the L2 distances between heads."""

    mean: float
    std: float


PAPER = {
    "softmax": Printed(2.01, 0.39), "bn": Printed(2.45, 0.66), "sh": Printed(3.81, 0.75), "bn+sh": Printed(3.19, 1.01),
}  # fmt: skip
"""Of models trained on the Retrieval task."""

COLUMNS = ("figure", "pooling", "mechanism", "seeds", "mean", "std", "paper")
POOLINGS = ("repeated", "shared")
FIGURES = {"mean": "mean", "std": "std of layers", "std_within": "std in layers"}
"""Of `Average`, as tables name them."""

LEGEND = (
    "L2 distance between the whole attention maps of two heads of a layer, over the tokens that are not padding; mean "
    "over pairs of heads and documents, then over layers. Measured: mean ± std (n − 1) over seeds. paper: as printed; "
    "it says neither how many models and documents, nor how it compares maps of unequal width.",
    "repeated: each token has the whole weight of its window, so that two heads of scales s and t that look everywhere "
    "alike are already |s − t| apart. shared: the window's weight is shared equally by its tokens. Heads that are not "
    "pooled have one distance.",
    "std of layers: the standard deviation (n − 1) of the layers' means. std in layers: that over pairs of heads and "
    "documents in a layer, its mean over layers. The paper's words can mean either.",
)


@dataclass(frozen=True, eq=False)
class Redundancy:
    """Distances between the heads of trained models.

    Args:
        data: title of the set whose documents were looked at.
        found: by mechanism, those of each seed.
        notes: what a reader must know.
    """

    data: str
    found: dict[str, tuple[HeadDistances, ...]]
    notes: tuple[str, ...] = ()

    def values(self, mechanism: str, pooling: str, figure: str) -> list[float]:
        """A field of `Average`, for each seed that has it."""
        averages = (getattr(one, pooling) for one in self.found[mechanism])
        values = (getattr(average, figure) for average in averages if average is not None)
        return [value for value in values if value is not None]

    def grids(self) -> tuple[Grid, ...]:
        """The numbers as text."""
        rows = []
        for figure, title in FIGURES.items():
            rows.append((title, "paper", *(_number(_printed(name, figure)) for name in self.found)))
            for pooling in POOLINGS:
                measured = (self.values(name, pooling, figure) for name in self.found)
                texts = (spread_text(v, len(s)) for v, s in zip(measured, self.found.values(), strict=True))
                rows.append(("", pooling, *texts))
        return (Grid(f"{NAME}: L2 distance between heads, {self.data}", ("", "", *self.found), tuple(rows)),)

    def rows(self) -> Iterator[dict[str, Any]]:
        """For CSV: a row per figure, pooling and mechanism."""
        for figure, title in FIGURES.items():
            for pooling in POOLINGS:
                for name in self.found:
                    values = self.values(name, pooling, figure)
                    yield {
                        "figure": title, "pooling": pooling, "mechanism": name, "seeds": len(values),
                        **(spread(values)._asdict() if values else {}), "paper": _printed(name, figure),
                    }  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types: every seed with all its layers."""
        found = {name: [one.to_dict() for one in seeds] for name, seeds in self.found.items()}
        return {"data": self.data, "mechanisms": found, "notes": list(self.notes)}

    def markdown(self) -> str:
        """For reading."""
        return render.markdown(self.grids(), self.notes, LEGEND)

    def csv(self) -> str:
        """For computing."""
        return render.csv(COLUMNS, self.rows())

    def latex(self) -> str:
        """For a paper; needs booktabs."""
        return render.latex(self.grids(), self.notes, LEGEND)


def measured(models: Mapping[str, Iterable[nn.Module]], batch: Any, data: str, notes: Iterable[str] = ()) -> Redundancy:
    """The table from trained models.

    Args:
        models: by mechanism, one per seed; each is looked at once, so they may come one by one.
        batch: what every model is called with, as in `head_distance`.
        data: title of the set that the batch is from, such as "Retrieval".
        notes: what a reader must know, such as what is not as in the paper.
    """
    found = {name: tuple(head_distance(model, batch) for model in seeds) for name, seeds in models.items()}
    return Redundancy(data, found, tuple(notes))


def _printed(mechanism: str, figure: str) -> float | None:
    number = PAPER.get(mechanism)
    return None if number is None else number.mean if figure == "mean" else number.std


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
