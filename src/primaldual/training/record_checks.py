"""Whether JSON is a record of a run: what a report would stumble over is found when the file is read."""

from __future__ import annotations

import hashlib
import json
import math
from typing import TYPE_CHECKING, Any

from ..primal import Spec, UnknownKindError
from .recipe import Recipe

if TYPE_CHECKING:
    from .record import Record

CHECKSUM = "sha256"
SCORES = "best", "last", "selected"


def checksum(data: dict[str, Any]) -> str:
    """Of a record's JSON, whatever the order of its names; the checksum itself does not enter."""
    rest = {name: value for name, value in data.items() if name != CHECKSUM}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def problem(record: Record, data: dict[str, Any]) -> str | None:
    """Why this record, read from this JSON, is none; None where nothing is found."""
    for name, kinds in _KINDS.items():
        if type(value := getattr(record, name)) not in kinds:
            return f"{name} is {value!r}"[:100]
    if type(record.data.get("name")) is not str or type(record.data.get("hash")) is not str:
        return "it does not say what the data are"
    if "train" not in record.data or any(
        type(n) is not int or n < 0 for name, n in record.data.items() if name in ("train", "test", "validation")
    ):
        return "the numbers of cases are none"
    notes = record.data.get("notes", [])
    if not isinstance(notes, list) or not all(type(note) is str for note in notes):
        return "the notes on the data are no sentences"
    if not all(type(seed) is int for seed in record.members) or record.seed not in record.members or record.seed < 0:
        return f"seed {record.seed} is not one of the members {record.members!r}"[:100]
    if not all(_is_number(x) for x in record.speed.values()):
        return f"the speed is {record.speed!r}"[:100]
    if not 0 <= record.seconds < math.inf:
        return f"seconds are {record.seconds!r}"
    return _stated(record) or _history(record) or _scores(record, data)


_NOT_GIVEN = type(None)
_KINDS: dict[str, tuple[type, ...]] = {
    "key": (str,), "version": (int,), "data": (dict,), "mechanism": (dict, _NOT_GIVEN), "recipe": (dict,),
    "seed": (int,), "members": (list,), "metric": (str,), "history": (dict,), "failure": (str, _NOT_GIVEN),
    "parameters": (int,), "seconds": (int, float), "peak_bytes": (int, _NOT_GIVEN), "environment": (dict,),
    "more_is_better": (bool,), "steps": (int, _NOT_GIVEN), "task": (dict,), "speed": (dict,),
}  # fmt: skip


def _stated(record: Record) -> str | None:
    """Recipe and mechanism; those with parts that are not defined in this process are taken as they are."""
    try:
        Recipe.from_dict(record.recipe)
        if record.mechanism is not None:
            Spec.from_dict(record.mechanism)
    except UnknownKindError:
        return None if {"epochs", "steps", "test_at_end"} <= set(record.recipe) else "the recipe is none"
    except ValueError as error:
        return str(error)
    return None


def _history(record: Record) -> str | None:
    history, unit = record.history, record.unit
    if unit not in history or not all(isinstance(values, list) for values in history.values()):
        return f"the history is not one of {unit}s"
    if len({len(values) for values in history.values()}) != 1:
        return "the history has values of unequal number"
    times = history[unit]
    if not all(_is_number(x) and x == int(x) for x in times) or times != sorted(set(times)):
        return f"the history is not in the order of {unit}s"
    for part, values in history.items():
        waits = part == "test" and record.recipe["test_at_end"] is True
        if not all(_is_number(x) or (x is None and waits) for x in values):
            return f"the history of {part} is no numbers"
    return None


def _scores(record: Record, data: dict[str, Any]) -> str | None:
    """What is said of the history, where it is said, follows from it."""
    for name in SCORES:
        score = getattr(record, name)
        if score is not None and not _is_number(score.value):
            return f"there is no {name}"
        if name in data and data[name] != (score and {record.unit: score.at, "value": score.value}):
            return f"{name} is not what follows from the history"
    return None


def _is_number(x: Any) -> bool:
    return type(x) in (int, float) and math.isfinite(x)
