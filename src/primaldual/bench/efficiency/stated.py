"""The point that the paper states in words, beside what is counted and measured there.

It is that of the task's own model, dimension 64 and length 4096, and of Attention-BN+SH over softmax.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..session import Content, Measurement
from .memory import peak
from .setting import ATTENTIONS, BASELINES, STEPS, Setting

POINT = 64, 4096
"""Dimension and length."""

PAPER = {
    ("bn+sh", "flops", "training"): -0.25, ("bn+sh", "flops", "inference"): -0.25,
    ("bn+sh", "bytes", "training"): -0.319, ("bn+sh", "bytes", "inference"): -0.473,
}  # fmt: skip
"""By mechanism, figure and step; of FLOPs it says "almost"."""


def ratio(record: Measurement, name: str, figure: str) -> float | None:
    """A figure of a mechanism over that of its baseline; None where one of them is not there."""
    own, baseline = (record["mechanisms"][one].get(figure) for one in (name, BASELINES[name]))
    return None if own is None or baseline is None else own / baseline


def summary(content: Content) -> Content:
    """At the stated point, or the largest one there is: change of FLOPs and of memory by mechanism and step.

    Beside them what the paper says, and what its memory depends on, counted.
    """
    costs = [r for r in content["records"] if r["subject"] == "cost"]
    points = {(r["dimension"], r["length"]) for r in costs}
    if not points:
        return {"stated": None}
    point = POINT if POINT in points else max(points)
    here = {(r["attention"], r["step"]): r for r in costs if (r["dimension"], r["length"]) == point}
    rows = [_row(here, name, figure, step) for name in BASELINES for figure in ("flops", "bytes") for step in STEPS]
    if point == POINT:
        rows = [row | {"paper": PAPER.get((row["mechanism"], row["figure"], row["step"]))} for row in rows]
    stated: dict[str, Any] = {"dimension": point[0], "length": point[1], "rows": rows}
    return {"stated": stated | {"assumptions": [dict(_assumed(*given)) for given in assumptions()]}}


def _row(here: dict[tuple[str, str], Measurement], name: str, figure: str, step: str) -> Measurement:
    row: Measurement = {"mechanism": name, "baseline": BASELINES[name], "figure": figure, "step": step}
    for attention in ATTENTIONS:
        record = here.get((attention, step))
        for kind, field in (("counted", figure), ("measured", f"measured_{figure}")):
            found = None if record is None else ratio(record, name, field)
            row[f"{attention}_{kind}"] = None if found is None else found - 1
    return row


def assumptions() -> Iterator[tuple[str, Setting]]:
    """The stated point as it is counted, and with one thing changed."""
    counted = Setting(*POINT)
    yield "as counted: one pair, one document after the other", counted
    yield "with what AdamW keeps, in inference too", replace(counted, optimizer=True)
    yield "32 pairs", replace(counted, pairs=32)
    yield "both documents of a pair at once", replace(counted, in_turn=False)
    yield "without dropout", replace(counted, dropout=0.0)


def _assumed(what: str, setting: Setting) -> Iterator[tuple[str, Any]]:
    yield "what", what
    for step in STEPS:
        at = replace(setting, step=step)
        yield step, peak("bn+sh", at).bytes / peak("softmax", at).bytes - 1
