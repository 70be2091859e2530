"""What a run leaves behind: one JSON file, named by the hash of what was run."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from ..data import Dataset
from ..primal import Primal
from .loop import History, best_at
from .recipe import VERSION, Recipe


class Score(NamedTuple):
    """A metric, that of the test set unless said otherwise, and the epoch after which it was measured."""

    epoch: int
    value: float


@dataclass(frozen=True)
class Record:
    """One run of one seed.

    Args:
        key: hash of version, recipe, mechanism, data and seed.
        version: of the recipe's code.
        data: name and hash of the set, and its sizes.
        mechanism, recipe: as `to_dict` gives them.
        seed: of this member.
        members: seeds of all that trained together with it.
        metric: "accuracy", in percent, or "rmse".
        history: at every evaluation: epoch, loss, and the metric on the test set and on validation.
        failure: why the run ended before its time; None when it did not.
        parameters: of the model.
        seconds, peak_bytes: wall time and memory of all members together; no memory where it is not known.
        environment: versions and hardware.
    """

    key: str
    version: int
    data: dict[str, Any]
    mechanism: dict[str, Any]
    recipe: dict[str, Any]
    seed: int
    members: list[int]
    metric: str
    history: History
    failure: str | None
    parameters: int
    seconds: float
    peak_bytes: int | None
    environment: dict[str, Any]

    @property
    def best(self) -> Score | None:
        """At the best epoch on the test set: what the paper's code bases report."""
        return self._at(best_at(self.history["test"], self.metric == "accuracy")) if self._tested else None

    @property
    def last(self) -> Score | None:
        """After the last epoch of the recipe, nothing selected; None for a run that did not get there."""
        reached = self._tested and self.history["epoch"][-1] == self.recipe["epochs"]
        return self._at(-1) if reached else None

    @property
    def selected(self) -> Score | None:
        """At the best epoch on what was held out of the training set; None without validation."""
        best = self.validation
        return self._at(self.history["epoch"].index(best.epoch)) if best and self._tested else None

    @property
    def validation(self) -> Score | None:
        """The best on what was held out of the training set; None without validation."""
        if not (values := self.history.get("validation")):
            return None
        index = best_at(values, self.metric == "accuracy")
        return Score(int(self.history["epoch"][index]), values[index])

    @property
    def _tested(self) -> bool:
        return bool(self.history.get("test"))

    def _at(self, index: int) -> Score:
        return Score(int(self.history["epoch"][index]), self.history["test"][index])

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types, the three scores first."""
        scores = {name: getattr(self, name) for name in ("best", "last", "selected")}
        return {name: score and score._asdict() for name, score in scores.items()} | asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Record:
        """The inverse of `to_dict`."""
        return cls(**{field.name: data[field.name] for field in fields(cls)})


def key(recipe: Recipe, primal: Primal, data: Dataset, *seeds: int) -> str:
    """The name of a run: a hash of all that its result follows from. Without seeds, that of the configuration."""
    what = {
        "version": VERSION, "recipe": recipe.to_dict(), "mechanism": primal.to_dict(), "data": data.hash,
        "seeds": list(seeds),
    }  # fmt: skip
    text = json.dumps(_plain(what), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _plain(value: Any) -> Any:
    """One form for equal numbers: 1.0 is written as 1."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
