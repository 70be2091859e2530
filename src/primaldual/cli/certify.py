"""`primaldual certify NAME`, `primaldual certify --all`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from ..base.terminal import titled
from ..base.threads import on_threads
from ..primal import mechanisms
from .main import _escape, _fail, app, console

if TYPE_CHECKING:
    from ..regression.certification import Certification, Check

COLUMNS = {
    "gap": ("duality gap",),
    "KKT": ("primal feasibility", "dual domain", "complementarity", "stationarity"),
    "W": ("by W vs by α",),
    "attention": ("by attention vs by α",),
    "recovery": ("recovery, at keys", "recovery, at queries"),
    "α": ("recovery, α",),
}
LEGEND = """gap: relative duality gap. KKT: the worst of the four residuals.
W, attention: outputs by W Φ(x)/h(x), and by attention, against those by α.
recovery, α: of a head with random values, from the regression that it solves."""


@app.command(
    epilog="**Examples**\n\n- `primaldual certify bn+sh`\n\n- `primaldual certify linear --length 64 --bias`"
    "\n\n- `primaldual certify --all --seed 1`\n\n- `primaldual certify --all --json`"
)
def certify(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="One of `primaldual mechanisms`.", show_default=False)
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every mechanism, one line each.")] = False,
    length: Annotated[
        int | None,
        typer.Option(
            min=1, help="Keys: 24 unless given, 48 of `sparse`; `conv2d` the nearest square.", show_default=False
        ),
    ] = None,
    head_dim: Annotated[int, typer.Option(min=1, help="Dimensions of a key.")] = 8,
    heads: Annotated[int | None, typer.Option(min=1, help="Heads: 4 unless given.", show_default=False)] = None,
    values: Annotated[int, typer.Option(min=1, help="Outputs of a head.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the problem that is drawn.")] = 0,
    epsilon: Annotated[float, typer.Option(help="Half-width of the tube.")] = 0.1,
    bias: Annotated[bool, typer.Option("--bias", help="Fit b too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check on a random problem that a mechanism is the dual of its regression.

    Solves the paper's support vector regression and certifies the solution; compares f by the weights W, by the dual
    variables α and by attention; and reads a head with random values back from the regression that it solves.
    Exit status 1 if anything exceeds its tolerance.
    """
    from ..regression.claims import certify as run

    if every == (name is not None):
        raise _fail("give the NAME of a mechanism, or --all", 2)
    try:
        with on_threads(1):  # the matrices are small
            found = [
                run(
                    each, length=length, head_dim=head_dim, heads=heads, values=values, seed=seed, epsilon=epsilon,
                    bias=bias,
                )
                for each in (mechanisms() if name is None else (name,))
            ]  # fmt: skip
    except ValueError as error:
        raise _fail(error, 2) from None
    ok = all(one.ok for one in found)
    if as_json:
        plain = [one.to_dict() for one in found]
        typer.echo(json.dumps({"ok": ok, "certifications": plain} if every else plain[0], indent=2, allow_nan=False))
    elif every:
        _print_all(found)
    else:
        _print_one(found[0])
    if not ok:
        raise typer.Exit(1)


def _print_one(one: Certification) -> None:
    bias = ", with bias" if one.bias else ""
    title = (
        f"{one.mechanism}: {one.length} keys, {one.heads} heads of {one.head_dim}, {one.outputs} outputs, "
        f"ε {one.epsilon:g}{bias}, seed {one.seed}"
    )
    table = titled(title)
    table.add_column("check", style="bold cyan", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("tolerance", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("")
    for check in one.checks:
        tolerance = "" if check.tolerance is None else f"{check.tolerance:.0e}"
        table.add_row(check.name, _value(check), tolerance, _status(check.status), _escape(check.note))
    console.print(table)
    counts = one.alpha
    for note in (f"α: {counts['zero']} zero, {counts['free']} free, {counts['bound']} at the bound", *one.notes):
        console.print(note, style="dim", highlight=False)
    _verdict([one])


def _print_all(found: list[Certification]) -> None:
    one = found[0]
    bias = ", with bias" if one.bias else ""
    title = f"heads of {one.head_dim}, {one.outputs} outputs, ε {one.epsilon:g}{bias}, seed {one.seed}"
    table = titled(title)
    table.add_column("mechanism", style="bold cyan", no_wrap=True)
    for heading in COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    limits = {check.name: check.tolerance for one in found for check in one.checks}
    tolerances = [limits.get(names[0]) for names in COLUMNS.values()]
    table.add_row("tolerance", *("–" if x is None else f"{x:.0e}" for x in tolerances), style="dim", end_section=True)
    for one in found:
        by_name = {check.name: check for check in one.checks}
        cells = [_worst_of([by_name[n] for n in names if n in by_name]) for names in COLUMNS.values()]
        table.add_row(one.mechanism, *cells, _status("ok" if one.ok else "FAILED"))
    console.print(table)
    console.print(LEGEND, style="dim", highlight=False)
    said: dict[str, list[str]] = {}
    for one in found:
        skipped = dict.fromkeys(f"–, {check.note}" for check in one.checks if check.status == "skipped")
        for note in (*skipped, *one.notes):
            said.setdefault(note, []).append(one.mechanism)
    for note, names in said.items():
        console.print(_escape(f"{', '.join(names)}: {note}"), style="dim", highlight=False)
    _verdict(found)


def _worst_of(checks: list[Check]) -> str:
    """One cell for several checks: one that failed, else the largest value."""
    if not checks:
        return "–"
    from ..regression.certification import worst

    one = worst(checks)
    return f"[red]{_value(one)}[/]" if one.status == "FAILED" else _value(one)


def _value(check: Check) -> str:
    if check.value is None:
        return "–"
    return f"{check.value:.0f}" if check.name == "rank deficiency" else f"{check.value:.1e}"


def _status(status: str) -> str:
    return {"ok": "[green]ok[/]", "FAILED": "[bold red]FAILED[/]", "info": ""}.get(status, f"[dim]{status}[/]")


def _verdict(found: list[Certification]) -> None:
    for one in found:
        for check in one.failed:
            limit = "" if check.tolerance is None else f", tolerance {check.tolerance:.0e}"
            line = f"[bold red]FAILED[/] {one.mechanism}: {check.name} is {_value(check)}{limit}"
            console.print(line, highlight=False, soft_wrap=True)
    passed = sum(one.ok for one in found)
    if passed == len(found):
        what = f"all {passed} mechanisms" if passed > 1 else found[0].mechanism
        console.print(f"[green]certified:[/] {_escape(what)}", highlight=False)
    else:
        console.print(f"{passed} of {len(found)} certified", highlight=False)
