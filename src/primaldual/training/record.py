"""What a run leaves behind: one JSON file per seed, named by the hash of what was run.

The key is the SHA-256, cut to 20 hex digits, of the JSON of {version, recipe, seeds} and of what the task says of
itself: {task: name, hash of the cases, model}; of the library's own sets {mechanism, data}. What a recipe has had only
since the first records enters where it is not at its default (`Task.recipe_in_key`), so that runs of before are found.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from .progress import History, best_at
from .recipe import VERSION, Recipe, completed
from .record_checks import CHECKSUM, SCORES, checksum, problem
from .series_recipe import nested
from .task import Task


class RecordError(ValueError):
    """Something is no record of a run, or not as it was written."""


class Score(NamedTuple):
    """A metric, that of the test part unless said otherwise, and the epoch (or step) after which it was measured."""

    at: int
    value: float


@dataclass(frozen=True)
class Record:
    """What one seed of a run left.

    Args:
        key: hash of version, recipe, task and seed.
        version: of the recipe's code.
        data: name and hash of the cases, and their sizes.
        mechanism, recipe: as `to_dict` gives them; a task whose mechanism is part of its model has None.
        seed: of this member.
        members: seeds of all that trained together with it.
        metric: its name, such as "accuracy", in percent, or "rmse".
        history: at every evaluation: epoch or step, loss, and the metric on the test part and on validation.
        failure: why the run ended before its time; None when it did not.
        parameters: of the model.
        seconds, peak_bytes: wall time and memory of all members together; no memory where it is not known.
        environment: versions and hardware.
        more_is_better: of the metric.
        steps: of the optimiser, in all; None where it was not recorded.
        task: what else a task says of itself.
        speed: seconds of a step of all members together, in the median, and what the task says of it.
    """

    key: str
    version: int
    data: dict[str, Any]
    mechanism: dict[str, Any] | None
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
    more_is_better: bool = True
    steps: int | None = None
    task: dict[str, Any] = field(default_factory=dict)
    speed: dict[str, float] = field(default_factory=dict)

    @property
    def unit(self) -> str:
        """What the training was counted in: "epoch" or "step"."""
        return "epoch" if self.recipe["steps"] is None else "step"

    @property
    def best(self) -> Score | None:
        """At the best evaluation of the test part: what the paper's code bases for time series report.

        None where the test part waited for the end: there it chose nothing.
        """
        if not self._tested or self.recipe["test_at_end"]:
            return None
        return self._at(best_at(self.history["test"], self.more_is_better))

    @property
    def last(self) -> Score | None:
        """At the end of the recipe, nothing selected; None for a run that did not get there."""
        reached = self._tested and self.history[self.unit][-1] == self.recipe[f"{self.unit}s"]
        return self._at(-1) if reached else None

    @property
    def selected(self) -> Score | None:
        """At the best evaluation of the validation part; None without one."""
        best = self.validation
        return self._at(self.history[self.unit].index(best.at)) if best and self._tested else None

    @property
    def validation(self) -> Score | None:
        """The best on the validation part; None without one."""
        if not (values := self.history.get("validation")):
            return None
        index = best_at(values, self.more_is_better)
        return Score(int(self.history[self.unit][index]), values[index])

    @property
    def _tested(self) -> bool:
        return bool(self.history.get("test"))

    def _at(self, index: int) -> Score:
        return Score(int(self.history[self.unit][index]), self.history["test"][index])

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types, the three scores first."""
        scores = {name: getattr(self, name) for name in ("best", "last", "selected")}
        said = {name: score and {self.unit: score.at, "value": score.value} for name, score in scores.items()}
        return said | asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Record:
        """The inverse of `to_dict`; what older records do not have follows from what they have.

        A `RecordError` says why something is no record of a run, or not as it was written.
        """
        try:
            record = cls._of(data)
            found = problem(record, data)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise RecordError(f"{type(error).__name__}: {error}"[:200]) from None
        unknown = set(data) - {f.name for f in fields(cls)} - {*SCORES, CHECKSUM}
        if unknown and not found:
            found = f"it also has {', '.join(sorted(unknown))}"[:100]
        if not found and CHECKSUM in data and data[CHECKSUM] != checksum(data):
            found = "it is not what its checksum was made of"
        if found:
            raise RecordError(found)
        return record

    @classmethod
    def _of(cls, data: dict[str, Any]) -> Record:
        given = {f.name: data[f.name] for f in fields(cls) if f.name in data or f.name not in _LATER}
        later: dict[str, Any] = {"recipe": completed(nested(given["recipe"]))}
        if "more_is_better" not in data:
            later["more_is_better"] = data["metric"] == "accuracy"
        return cls(**given | later)


_LATER = ("more_is_better", "steps", "task", "speed")


def key(task: Task, recipe: Recipe, *seeds: int) -> str:
    """The name of a run: a hash of all that its result follows from. Without seeds, that of the configuration."""
    what = task.identity() | {"version": VERSION, "recipe": task.recipe_in_key(recipe), "seeds": list(seeds)}
    text = json.dumps(_plain(what), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _plain(value: Any) -> Any:
    """One form for equal numbers: 1.0 is written as 1."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
