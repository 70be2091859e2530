"""What was measured, for a terminal."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.table import Table

from ..base.terminal import titled
from .session import Content, Measurement

LEGEND = """ratio: ours ÷ the fastest fused softmax (rival), median of interleaved rounds. limit: that ratio of FLOPs.
length: × batch. FLOP/s, bytes/s: % of this run's matrix product and copy, counting the fewest of each.
memory: inputs, parameters and the most that one eager step allocates beyond them."""
_SHARED = ("subject", "dtype", "tf32", "heads", "head_dim", "step", "mode", "causal")


def results_tables(content: Content) -> list[Table]:
    """A table per dtype, head dimension, step and mode, with one line per record."""
    groups: dict[tuple[Any, ...], list[Measurement]] = {}
    for record in content["records"]:
        groups.setdefault(tuple(record[key] for key in _SHARED), []).append(record)
    return [_results(records) for records in groups.values()]


def _results(records: list[Measurement]) -> Table:
    first = records[0]
    dtype = "tf32" if first["tf32"] else first["dtype"]
    what = f"{first['subject']}, {first['step']}, {first['mode']}" + (", causal" if first["causal"] else "")
    table = titled(f"{what}: {dtype}, {first['heads']} heads of {first['head_dim']}")
    table.add_column("mechanism", style="bold cyan", no_wrap=True)
    with_memory = any(r.get("peak_bytes") for r in records)
    for heading in ("length", "time", "ratio", "spread", "limit", "FLOP/s", "bytes/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    if with_memory:
        table.add_column("memory", justify="right", no_wrap=True)
    table.add_column("rival", min_width=9)
    for r in records:
        cells = [r["mechanism"] + (", rotary" if r["rotary"] else ""), f"{r['length']} × {r['batch']}"]
        if r["error"]:
            table.add_row(*cells, *("–" for _ in range(6 + with_memory)), f"[yellow]{escape(r['error'])}[/]")
            continue
        cells += [_time(r["seconds"]), f"[bold]{two_digits(r.get('ratio'))}[/]"]
        cells += [f"{two_digits(r['ratio_min'])}–{two_digits(r['ratio_max'])}" if "ratio" in r else "–"]
        cells += [two_digits(r["arithmetic_limit"]), _percent(r.get("flops_share")), _percent(r.get("bytes_share"))]
        table.add_row(*cells, *([bytes_text(r["peak_bytes"])] if with_memory else []), r["rival"] or "none fused")
    return table


def preset_tables(content: Content) -> list[Table]:
    """The targets, if there are any; and what was measured beside them."""
    targets = content["targets"]
    bound = {target["record"] for target in targets}
    beside = [record for place, record in enumerate(content["records"]) if place not in bound]
    return [*([targets_table(content)] if targets else []), *results_tables({"records": beside})]


def targets_table(content: Content) -> Table:
    """One line per target: measured, must, dream."""
    table = titled("targets: time ÷ best fused softmax, unless named otherwise")
    table.add_column("target", style="bold cyan", no_wrap=True)
    for heading in ("length", "step", "mode", "measured", "must", "dream"):
        table.add_column(heading, justify="left" if heading in ("step", "mode") else "right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("rival", min_width=9)
    for target in content["targets"]:
        r = content["records"][target["record"]]
        sign = "≥" if target["at_least"] else "≤"
        verdict = "[green]dream[/]" if target["dreamt"] else "[green]ok[/]" if target["met"] else "[bold red]MISSED[/]"
        dream = "" if target["dream"] is None else f"{sign} {target['dream']:g}"
        step = {"forward": "fwd", "forward+backward": "fwd+bwd"}[r["step"]]
        why = r["error"] or r.get("rival") or "no fused softmax"
        table.add_row(
            target["name"], f"{r['length']} × {r['batch']}", step, r["mode"],
            f"[bold]{three_decimals(target['value'])}[/]", f"{sign} {target['must']:g}", dream, verdict, escape(why),
        )  # fmt: skip
    return table


def ceilings_line(content: Content) -> str:
    """The ceilings in words."""
    ceilings = content["ceilings"]
    if ceilings is None:
        return "ceilings: not measured"
    rates = ", ".join(f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in ceilings["flops_per_second"].items())
    return f"ceilings: copy {ceilings['bytes_per_second'] / 1e9:.0f} GB/s, matrix product {rates}"


def _time(seconds: float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def two_digits(value: float | None) -> str:
    """With about two digits that matter."""
    if value is None:
        return "–"
    return f"{value:.3f}" if value < 0.1 else f"{value:.2f}" if value < 10 else f"{value:.0f}"


def three_decimals(value: float | None) -> str:
    """With three decimals."""
    return "–" if value is None else f"{value:.3f}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f}%" if share >= 0.1 else f"{100 * share:.1f}%"


def bytes_text(count: int | None) -> str:
    """Bytes."""
    if count is None:
        return "–"
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
