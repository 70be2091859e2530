"""What a training step must take on an H200, what the reference takes there, and both for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rich.table import Table

from ..base.terminal import titled
from .session import Content, Measurement
from .table import bytes_text, three_decimals, two_digits

LEGEND = """ms: per step and seed, median of interleaved rounds. alone: one model at a time in a plain torch loop, whose
softmax is torch's fused attention; on long sequences softmax with the map of every head written out, as the field's
code has it. ratio: ms ÷ alone in one round, the median. mvts: ms of mvts_transformer on an H200. steps/s: of all seeds.
shape: batch × steps. model: layers × width. executor: of the attention. memory: the most allocated, per seed."""


class Reference(NamedTuple):
    """mvts_transformer, one model at a time on an H200, at the paper's sizes: per step; None where not measured."""

    ms: float
    peak_bytes: int | None = None


REFERENCE = {
    "SpokenArabicDigits": Reference(14.0),
    "Heartbeat": Reference(6.2),
    "SelfRegulationSCP1": Reference(47.7, 14 * 2**30),
    "EthanolConcentration": Reference(55.4, 24 * 2**30),
}


class TrainingTarget(NamedTuple):
    """A figure of a record at the paper's sizes, with five seeds, and its upper bound.

    impl: "sdpa" stands for library kernels, "auto" for the fastest there are. figure: a record's own, or "to_softmax",
    its milliseconds over those of the softmax record beside it.
    """

    dataset: str
    impl: str
    figure: str
    must: float
    mechanism: str = "softmax"


def _targets() -> Iterator[TrainingTarget]:
    yield TrainingTarget("SpokenArabicDigits", "auto", "ms_per_step_per_seed", 0.6)
    yield TrainingTarget("Heartbeat", "auto", "ms_per_step_per_seed", 0.5)
    for name in ("SelfRegulationSCP1", "EthanolConcentration"):
        yield TrainingTarget(name, "sdpa", "ms_per_step_per_seed", 5.0)
        yield TrainingTarget(name, "auto", "ms_per_step_per_seed", 3.0)
        peak = REFERENCE[name].peak_bytes
        assert peak is not None
        yield TrainingTarget(name, "auto", "peak_bytes_per_seed", peak / 8)
    for name, ms in (("lra-listops", 3.0), ("lra-text", 7.0), ("lra-retrieval", 14.0), ("lra-image", 6.0)):
        yield TrainingTarget(name, "auto", "ms_per_step_per_seed", ms)
        yield TrainingTarget(name, "auto", "memory_ratio", 1 / 8)
    for name in ("lra-text", "lra-retrieval"):
        yield TrainingTarget(name, "auto", "to_softmax", 1.0, "bn+sh")


TARGETS = tuple(_targets())


def verdicts(content: Content) -> Content:
    """Each target whose case was measured: its figure beside its bound. On an H200 alone, which they are stated for."""
    if "H200" not in content["environment"]["device"]:
        return {"targets": []}
    places = {
        (r["dataset"], r["impl"], r["mechanism"]): place
        for place, r in enumerate(content["records"])
        if r["seeds"] == 5 and r["full_size"]
    }
    found = []
    for target in TARGETS:
        if (place := places.get((target.dataset, target.impl, target.mechanism))) is not None:
            record = content["records"][place]
            base = places.get((target.dataset, target.impl, "softmax"))
            value = record.get(target.figure)
            if target.figure == "to_softmax" and base is not None:
                value = _over(record, content["records"][base])
            found.append(
                {"name": _name(target), "figure": target.figure, "value": value, "must": target.must,
                 "met": value is not None and value <= target.must, "record": place}
            )  # fmt: skip
    return {"targets": found}


def _over(record: Measurement, softmax: Measurement) -> float | None:
    mine, other = (one.get("ms_per_step_per_seed") for one in (record, softmax))
    return mine / other if mine and other else None


def _name(target: TrainingTarget) -> str:
    if target.mechanism != "softmax":
        return f"{target.dataset}, {target.mechanism} ÷ softmax"
    return f"{target.dataset}, library kernels" if target.impl == "sdpa" else target.dataset


def results_tables(content: Content) -> list[Table]:
    """A table per mechanism, with one line per set and executor."""
    groups: dict[str, list[Measurement]] = {}
    for record in content["records"]:
        groups.setdefault(record["mechanism"], []).append(record)
    return [_results(records) for records in groups.values()]


def _results(records: list[Measurement]) -> Table:
    first = records[0]
    seeds = f"{first['seeds']} seed{'s' if first['seeds'] > 1 else ''} together"
    cut = "random series" if all(r["full_size"] for r in records) else "sizes below the paper's"
    table = titled(f"training step: {first['mechanism']}, {first['dtype']}, {seeds}, {cut}")
    table.add_column("set", style="bold cyan", no_wrap=True)
    shown = [name for name in ("peak_bytes_per_seed", "reference") if any(r.get(name) for r in records)]
    headings = ["shape", "model", "executor", "ms", "alone", "ratio"]
    headings += ["mvts"] * ("reference" in shown) + ["steps/s"]
    headings += ["memory", "alone"] * ("peak_bytes_per_seed" in shown)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "executor" else "right", no_wrap=True)
    for r in records:
        cells = [r["dataset"], f"{r['batch']} × {r['length']}", f"{r['layers']} × {r['d_model']}"]
        if r["error"]:
            table.add_row(*cells, r["impl"], *("–" for _ in headings[3:]))
            continue
        cells += [r["executor"], f"[bold]{three_decimals(r['ms_per_step_per_seed'])}[/]"]
        cells += [three_decimals(r["rival_ms_per_step_per_seed"]), two_digits(r["ratio"])]
        if "reference" in shown:
            cells.append(f"{r['reference']['ms']:g}" if "reference" in r else "–")
        cells.append(f"{r['steps_per_second']:.0f}")
        if "peak_bytes_per_seed" in shown:
            cells += [bytes_text(r["peak_bytes_per_seed"]), bytes_text(r["rival_peak_bytes_per_seed"])]
        table.add_row(*cells)
    return table


def targets_table(content: Content) -> Table:
    """One line per target: measured and must."""
    table = titled("targets on an H200: 5 seeds together, per seed")
    table.add_column("target", style="bold cyan", no_wrap=True)
    for heading in ("measured", "must", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for target in content["targets"]:
        verdict = "[green]ok[/]" if target["met"] else "[bold red]MISSED[/]"
        show = _SHOWN[target["figure"]]
        table.add_row(target["name"], f"[bold]{show(target['value'])}[/]", f"≤ {show(target['must'])}", verdict)
    return table


def _milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g} ms"


_SHOWN = {
    "ms_per_step_per_seed": _milliseconds, "peak_bytes_per_seed": bytes_text, "memory_ratio": two_digits,
    "to_softmax": two_digits,
}  # fmt: skip
