"""Bars per set: all seeds together, one model at a time, and the reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from ..base.style import COLOURS, INK, SOFT, figure, png, style

_TOGETHER = {"auto": COLOURS["bn+sh"], "sdpa": "#66c5ab"}
_ALONE, _REFERENCE, _MISSED = COLOURS["softmax"], "#cfd3da", "#c0392b"


class _Bar(NamedTuple):
    """ms is per step and seed; must is a bound of it."""

    label: str
    colour: str
    ms: float
    must: float | None = None


def training_plot(content: dict[str, Any]) -> bytes | None:
    """A PNG with a panel per mechanism; None when nothing was measured."""
    bounds = {t["record"]: t["must"] for t in content["targets"] if t["figure"] == "ms_per_step_per_seed"}
    panels: dict[str, dict[str, list[tuple[dict[str, Any], float | None]]]] = {}
    for place, r in enumerate(content["records"]):
        if r["error"] is None:
            panels.setdefault(r["mechanism"], {}).setdefault(r["dataset"], []).append((r, bounds.get(place)))
    if not panels:
        return None
    most = max(len(groups) for groups in panels.values())
    first = content["records"][0]
    with style():
        drawing = figure(max(6.4, 1.4 + 2.1 * most), 0.9 + 3.3 * len(panels))
        axes = drawing.subplots(len(panels), 1, sharey=True, squeeze=False)[:, 0]
        handles: dict[str, Any] = {}
        for one, (mechanism, groups) in zip(axes, panels.items(), strict=True):
            bars = {_group(records[0][0]): list(_bars(records)) for records in groups.values()}
            handles |= _panel(one, bars)
            one.set_title(f"{mechanism}, {first['dtype']}, seeds together: {first['seeds']}")
        shown = [bar.ms for r in panels.values() for records in r.values() for bar in _bars(records)]
        shown += [bound for bound in bounds.values() if bound]
        low, high = min(shown) / 2, 2 * max(shown)
        ticks = [10.0**e * m for e in range(-4, 6) for m in ((1, 2, 5) if high < 30 * low else (1,))]
        axes[0].set_ylim(low, high)
        axes[0].set_yticks([tick for tick in ticks if low <= tick <= high])
        if "must" in handles:
            handles["must"] = handles.pop("must")  # the last of the legend
        drawing.legend(handles=list(handles.values()), loc="outside lower center", ncols=min(len(handles), 3))
        drawing.suptitle(
            f"Training step, {content['environment']['device']}", x=0.01, ha="left", fontsize=12, fontweight="bold"
        )
        return png(drawing, 150)


def _group(record: dict[str, Any]) -> str:
    return f"{record['dataset']}\n{record['batch']} × {record['length']} steps"


def _bars(records: list[tuple[dict[str, Any], float | None]]) -> Iterator[_Bar]:
    """Of one set: a bar per executor, then one model at a time, then the reference where it has a figure."""
    for r, must in records:
        by = {"auto": "", "sdpa": ", library kernels"}.get(r["impl"], f", {r['impl']}")
        yield _Bar(f"seeds together{by}", _TOGETHER.get(r["impl"], COLOURS["sh"]), r["ms_per_step_per_seed"], must)
    first = records[0][0]
    yield _Bar("one model at a time, torch", _ALONE, first["rival_ms_per_step_per_seed"])
    if "reference" in first:
        yield _Bar("mvts_transformer, H200", _REFERENCE, first["reference"]["ms"])


def _panel(axes: Axes, groups: dict[str, list[_Bar]]) -> dict[str, Any]:
    """Draws, and gives the handles of the legend by label."""
    handles: dict[str, Any] = {}
    most = max(map(len, groups.values()))
    width = 0.84 / most
    for place, bars in enumerate(groups.values()):
        for i, bar in enumerate(bars):
            x = place + (i - (len(bars) - 1) / 2) * width
            handles[bar.label] = axes.bar(x, bar.ms, 0.92 * width, color=bar.colour, label=bar.label)
            missed = bar.must is not None and bar.ms > bar.must
            axes.annotate(
                f"{bar.ms:.3g}", (x, max(bar.ms, bar.must or 0.0)), (0, 3), textcoords="offset points", ha="center",
                fontsize=9, color=_MISSED if missed else INK,
            )  # fmt: skip
            if bar.must is not None:
                (handles["must"],) = axes.plot(
                    [x - width / 2, x + width / 2], [bar.must] * 2, color=INK, lw=2, label="must"
                )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel("ms per step and seed")
    axes.set_xticks(range(len(groups)), list(groups), color=SOFT)
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y")
    return handles
