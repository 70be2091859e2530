"""`primaldual bench kernels`, `primaldual bench layers`, `primaldual bench training`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ..primal import mechanism
from .main import _escape, _fail, app, console, errors
from .options import scales_option

if TYPE_CHECKING:
    from ..bench import Case
    from ..bench.training_case import TrainingCase

T = TypeVar("T")
DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {
        "lengths": (128, 512, 1024, 4096, 16384, 65536), "head_dims": (64, 128), "dtypes": ("bfloat16",),
        "modes": ("eager", "captured"), "tokens": 32768, "repeats": 30,
    },
    "cpu": {
        "lengths": (128, 512, 2048), "head_dims": (64,), "dtypes": ("float32",), "modes": ("eager",), "tokens": 2048,
        "repeats": 7,
    },
}  # fmt: skip
QUICK: dict[str, dict[str, Any]] = {
    "cuda": {"lengths": (128, 1024), "head_dims": (64,), "repeats": 5},
    "cpu": {"lengths": (128, 512), "tokens": 512, "repeats": 3},
}
TRAINING: dict[str, dict[str, Any]] = {
    "cuda": {"seeds": 5, "dtype": "bfloat16", "impl": "auto,sdpa", "batch": None, "steps": None, "repeats": 30},
    "cpu": {"seeds": 2, "dtype": "float32", "impl": "auto", "batch": 8, "steps": 64, "repeats": 7},
}
QUICK_SETS = "SpokenArabicDigits,Heartbeat"
SETS = f"{QUICK_SETS},SelfRegulationSCP1,EthanolConcentration"
MECHANISMS = ("bn", "sh", "bn+sh", "linear")
SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
PRESET_OPTIONS = {"preset", "output", "plot", "repeats", "quick", "device"}
TRAINING_OPTIONS = {"output", "plot", "repeats", "device"}
"""What may be given beside the defaults without a target ceasing to be one."""

bench = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Time, achieved FLOP/s and bytes/s, peak memory, and the ratio to the best fused softmax, on this machine.",
)
app.add_typer(bench, name="bench")


def measure(
    ctx: typer.Context,
    lengths: Annotated[
        str | None, typer.Option(help="Such as `128,1024`; up to 65536 on CUDA unless given.", show_default=False)
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="32768 tokens (2048 on a CPU) / length unless given.", show_default=False)
    ] = None,
    heads: Annotated[int, typer.Option(min=1, help="Heads.")] = 8,
    head_dims: Annotated[str | None, typer.Option(help="Such as `64,128`.", show_default=False)] = None,
    dtypes: Annotated[
        str | None, typer.Option(help="`bfloat16`, `float16`, `float32`, `float64`.", show_default=False)
    ] = None,
    mechanisms: Annotated[str, typer.Option(help="Of `primaldual mechanisms`.")] = ",".join(MECHANISMS),
    scales: Annotated[
        str | None, typer.Option(help="One per head, where a mechanism pools.", show_default=False)
    ] = None,
    steps: Annotated[
        str, typer.Option(help="`forward` (no gradients) and `forward+backward`.")
    ] = "forward,forward+backward",
    mode: Annotated[
        str | None, typer.Option(help="`eager`, `captured` (one CUDA graph), or `eager,captured`.", show_default=False)
    ] = None,
    impl: Annotated[str, typer.Option(help="The executor, as in `primaldual.attention`.")] = "auto",
    causal: Annotated[bool, typer.Option("--causal/--no-causal", help="Queries see earlier keys only.")] = False,
    dropout: Annotated[float, typer.Option(min=0.0, help="On the weights; the rival drops too.")] = 0.0,
    tf32: Annotated[bool, typer.Option("--tf32", help="Float32 products may round to tf32.")] = False,
    preset: Annotated[
        str | None, typer.Option(help="`targets`: the whole table of targets, kernels and layers.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="`results/<device>/<command>.json` unless given.", show_default=False)
    ] = None,
    plot: Annotated[bool, typer.Option("--plot/--no-plot", help="A PNG beside the JSON.")] = True,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Rounds: 30 on CUDA, 7 on a CPU unless given.", show_default=False)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two lengths, few rounds.")] = False,
    device: Annotated[
        str | None, typer.Option(help="`cuda` or `cpu`; a GPU where there is one.", show_default=False)
    ] = None,
) -> None:
    from ..bench import record, run, table, targets
    from ..bench.measure import Bench

    subject = str(ctx.info_name)
    try:
        where = _device(device)
        settings = DEFAULTS[where.type] | (QUICK[where.type] if quick else {})
        if preset is not None:
            cases = _preset(ctx, preset, where)
        else:
            cases = _grid(
                subject, where, settings, lengths, batch, heads, head_dims, dtypes, mechanisms, scales, steps, mode,
                impl, causal, dropout, tf32,
            )  # fmt: skip
    except ValueError as error:
        raise _fail(error, 2) from None
    path = output or Path("results") / record.slug(where) / f"{preset or subject}.json"
    runner = Bench(where, repeats or settings["repeats"], budget=0.5 if quick else 3.0)
    about = record.environment(where, _command(ctx))
    summary: run.Summary = targets.verdicts if preset else lambda done: {}
    try:
        with _progress(cases, lambda case: f"{case.mechanism}, {case.length}, {case.step}, {case.mode}") as before:
            content = run.run(runner, cases, path, about, before, summary)
    except OSError as error:
        raise _fail(f"{path} could not be written: {error.strerror}; choose another file with --output", 1) from None
    if content["records"]:
        _show([table.targets_table(content)] if preset else table.results_tables(content))
    console.print(table.LEGEND, style="dim", highlight=False, soft_wrap=True)
    console.print(table.ceilings_line(content), style="dim", highlight=False, soft_wrap=True)
    if plot:
        _plot("plot", "targets_plot" if preset else "ratio_plot", content, path)
    _finish(content, path, len(cases), fails=preset is not None)


_HOW = """

Ours and the rival run in turns after a warm-up: device events on CUDA, the wall clock on a CPU. The rival is the
fastest of torch's fused back ends for the same shape, dtype and step, in the same mode: eager ÷ eager, captured ÷
captured (the whole step is one CUDA graph). Inputs that a GPU's cache would hold are taken in turns from up to four
sets.

FLOPs are those of the expansion after its rewrites; backward adds 2.5 times the forward pass of an attention (twice
where it is linear). Bytes are the fewest: inputs read once, outputs written once. Both are shown as shares of a large
matrix product and a large copy (read + written), timed in the same run.

Peak memory (CUDA) is that of one eager step: inputs, parameters, and the most that it allocates beyond them.
"""
bench.command(
    "kernels",
    help="Measure `primaldual.attention` against torch's fused softmax attention." + _HOW,
    epilog="**Examples**\n\n- `primaldual bench kernels --quick`"
    "\n\n- `primaldual bench kernels --lengths 1024,4096 --mechanisms sh,linear --causal`"
    "\n\n- `primaldual bench kernels --preset targets` (exit status 1 if one is missed)",
)(measure)
bench.command(
    "layers",
    help="Measure `primaldual.MultiheadAttention`, projections included, against the same layer with softmax." + _HOW,
    epilog="**Examples**\n\n- `primaldual bench layers --quick`"
    "\n\n- `primaldual bench layers --lengths 4096 --batch 8 --mechanisms bn,bn+sh`",
)(measure)


@bench.command(
    epilog="**Examples**\n\n- `primaldual bench training` (on an H200 exit status 1 if a target is missed)"
    "\n\n- `primaldual bench training --only PEMS-SF,JapaneseVowels --mechanisms softmax,bn+sh --seeds 3`"
    "\n\n- `primaldual bench training --quick --device cpu`"
)
def training(
    ctx: typer.Context,
    only: Annotated[
        str | None, typer.Option(metavar="SET,SET", help="Sets of known size instead of four.", show_default=False)
    ] = None,
    mechanisms: Annotated[str, typer.Option(help="Of `primaldual mechanisms`.")] = "softmax",
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Members: 5 on CUDA, 2 on a CPU unless given.", show_default=False)
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Series per step: the recipe's, 8 on a CPU unless given.", show_default=False),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Where series are cut: nowhere, 64 on a CPU unless given.", show_default=False),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="`bfloat16` (on CUDA unless given) or `float32`.", show_default=False)
    ] = None,
    impl: Annotated[
        str | None,
        typer.Option(help="Executors of the attention: `auto,sdpa` on CUDA, `auto` on a CPU.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="`results/<device>/training.json` unless given.", show_default=False)
    ] = None,
    plot: Annotated[bool, typer.Option("--plot/--no-plot", help="A PNG beside the JSON.")] = True,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Rounds: 30 on CUDA, 7 on a CPU unless given.", show_default=False)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The two sets of short series, few rounds.")] = False,
    device: Annotated[
        str | None, typer.Option(help="`cuda` or `cpu`; a GPU where there is one.", show_default=False)
    ] = None,
) -> None:
    """Measure the training step of the paper's time-series models, per seed, with all seeds together.

    Model, batch and dropout are the recipe's for each set; series are random, of the published sizes and, where the
    archive's are, of unequal lengths. In turns with it runs what people would do instead: one model at a time in a
    plain torch loop. On a CPU batches and series are small, so that it ends in seconds; the table says what was run.

    Time is that of device events on CUDA, after a warm-up, and of the wall clock on a CPU. Peak memory (CUDA) is the
    most that was allocated since before the models were built, the series included, divided by the seeds.
    """
    from ..bench import record
    from ..bench import training_targets as targets
    from ..bench.training import TrainingBench, run

    try:
        where = _device(device)
        settings = TRAINING[where.type]
        cases = _training_cases(
            only or (QUICK_SETS if quick else SETS), mechanisms, impl or settings["impl"], dtype or settings["dtype"],
            seeds or settings["seeds"], batch or settings["batch"], steps or settings["steps"],
        )  # fmt: skip
    except ValueError as error:
        raise _fail(error, 2) from None
    path = output or Path("results") / record.slug(where) / "training.json"
    runner = TrainingBench(where, repeats or (3 if quick else settings["repeats"]), budget=0.5 if quick else 5.0)
    about = record.environment(where, _command(ctx))
    try:
        with _progress(cases, lambda case: f"{case.dataset}, {case.mechanism}, {case.impl}") as before:
            content = run(runner, cases, path, about, before)
    except OSError as error:
        raise _fail(f"{path} could not be written: {error.strerror}; choose another file with --output", 1) from None
    _show(targets.results_tables(content) + ([targets.targets_table(content)] if content["targets"] else []))
    for one in content["records"]:
        if one["error"]:
            what = f"{one['dataset']}, {one['mechanism']}, {one['impl']}: {one['error']}"
            console.print(f"[yellow]note:[/] {_escape(what)}", highlight=False, soft_wrap=True)
    console.print(targets.LEGEND, style="dim", highlight=False, soft_wrap=True)
    if plot:
        _plot("training_plot", "training_plot", content, path)
    _finish(content, path, len(cases), fails={name for name, *_ in _given(ctx)} <= TRAINING_OPTIONS)


def _training_cases(
    only: str, mechanisms: str, impl: str, dtype: str, seeds: int, batch: int | None, steps: int | None
) -> list[TrainingCase]:
    """The cases that the options ask for; a ValueError says what is wrong with them."""
    from ..bench.training_case import TrainingCase
    from ..data import manifest
    from ..ops import EXECUTORS

    sets, names, impls = (tuple(_parts("", text, str)) for text in (only, mechanisms, impl))
    for option, given, known in (
        ("--only", sets, tuple(manifest())),
        ("--impl", impls, ("auto", *EXECUTORS)),
        ("--dtype", (dtype := SHORT.get(dtype, dtype),), ("bfloat16", "float32")),
    ):
        for wrong in (one for one in given if one not in known):
            near = difflib.get_close_matches(wrong, known, n=1) if option == "--only" else []
            what = f"got {wrong!r}; did you mean {near[0]}?" if near else f"takes {', '.join(known)}; got {wrong!r}"
            raise ValueError(f"{option} {what}")
    cases = [
        TrainingCase(name, column, executor, seeds, dtype, batch, steps)
        for column in names
        for name in sets
        for executor in impls
    ]
    if not cases:
        raise ValueError("nothing to measure: --only, --mechanisms and --impl each need a name")
    for case in cases:
        case.config()  # raises where there is no such model
    return cases


def _device(asked: str | None) -> torch.device:
    if asked not in (None, "cuda", "cpu"):
        raise ValueError(f"--device must be cuda or cpu, got {asked!r}")
    if asked == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device")
    return torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))


def _preset(ctx: typer.Context, preset: str, device: torch.device) -> list[Case]:
    from ..bench import targets

    if preset != "targets":
        raise ValueError(f"--preset must be targets, got {preset!r}")
    if others := [option for name, option, _ in _given(ctx) if name not in PRESET_OPTIONS]:
        raise ValueError(f"--preset targets sets what is measured; leave out {', '.join(others)}")
    if device.type != "cuda":
        raise ValueError("--preset targets needs a CUDA device")
    return targets.cases()


def _grid(
    subject: str, device: torch.device, settings: dict[str, Any], lengths: str | None, batch: int | None, heads: int,
    head_dims: str | None, dtypes: str | None, mechanisms: str, scales: str | None, steps: str, mode: str | None,
    impl: str, causal: bool, dropout: float, tf32: bool,
) -> list[Case]:  # fmt: skip
    """The cases that the options ask for; a ValueError says what is wrong with them."""
    from ..bench import grid
    from ..bench.case import DTYPES, MODES, STEPS
    from ..ops import EXECUTORS

    def choices(option: str, text: str | None, default: str, among: tuple[str, ...]) -> tuple[str, ...]:
        chosen = tuple(SHORT.get(part, part) for part in _parts(option, text, str)) if text else settings[default]
        if wrong := [one for one in chosen if one not in among]:
            raise ValueError(f"{option} takes {', '.join(among)}; got {wrong[0]!r}")
        return chosen

    if dropout >= 1:
        raise ValueError(f"--dropout must be in [0, 1), got {dropout}")
    if impl not in ("auto", *EXECUTORS):
        raise ValueError(f"--impl must be one of auto, {', '.join(EXECUTORS)}; got {impl!r}")
    names = _parts("--mechanisms", mechanisms, str)
    for name in names:
        mechanism(name)  # raises, and says which there are
    modes = choices("--mode", mode, "modes", MODES)
    if device.type != "cuda" and ("captured" in modes or tf32):
        raise ValueError(f"{'--tf32' if tf32 else '--mode captured'} needs a CUDA device")
    return grid(
        "kernels" if subject == "kernels" else "layers",
        mechanisms=names,
        lengths=_parts("--lengths", lengths, _count) if lengths else settings["lengths"],
        head_dims=_parts("--head-dims", head_dims, _count) if head_dims else settings["head_dims"],
        dtypes=choices("--dtypes", dtypes, "dtypes", tuple(DTYPES)),
        steps=choices("--steps", steps, "steps", STEPS),
        modes=modes, tokens=settings["tokens"], batch=batch, heads=heads, scales=scales_option(scales), impl=impl,
        causal=causal, dropout=dropout, tf32=tf32,
    )  # fmt: skip


def _parts(option: str, text: str, kind: Callable[[str], T]) -> tuple[T, ...]:
    try:
        return tuple(dict.fromkeys(kind(part.strip()) for part in text.split(",") if part.strip()))
    except ValueError:
        raise ValueError(f"{option} takes positive integers, such as 128,1024; got {text!r}") from None


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _given(ctx: typer.Context) -> list[tuple[str, str, Any]]:
    """(name, option, value) of what stands on the command line."""
    found = []
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(str(parameter.name))
        if source is not None and source.name == "COMMANDLINE":
            found.append((str(parameter.name), parameter.opts[0], ctx.params[str(parameter.name)]))
    return found


def _command(ctx: typer.Context) -> str:
    """The command as it was typed, without the machine's paths."""
    parts = ["primaldual", "bench", str(ctx.info_name)]
    for name, option, value in _given(ctx):
        if isinstance(value, bool):
            parts.append(option if value else option.replace("--", "--no-", 1))
        elif name != "output":
            parts += [option, str(value)]
    return " ".join(parts)


class _progress(Generic[T]):  # noqa: N801
    """A bar over the cases, on stderr; entering gives what to call before each, and with None before the ceilings."""

    def __init__(self, cases: Sequence[T], describe: Callable[[T], str]) -> None:
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("ETA"),
            TimeRemainingColumn(),
        )  # fmt: skip
        self._bar, self._started, self._describe = Progress(*columns, console=errors, transient=True), 0, describe
        self._task = self._bar.add_task("", total=len(cases))

    def __enter__(self) -> Callable[[T | None], None]:
        self._bar.start()
        return self._before

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _before(self, case: T | None) -> None:
        if case is None:
            self._bar.update(self._task, description="ceilings")
            return
        self._bar.update(self._task, completed=self._started, description=self._describe(case))
        self._started += 1


def _show(tables: Sequence[Table]) -> None:
    # a log has no width of its own, so nothing need be cut there
    wide = console if console.is_terminal else Console(width=max(console.width, 120))
    for one in tables:
        wide.print(one)


def _plot(module: str, function: str, content: dict[str, Any], path: Path) -> None:
    """What a module of `primaldual.bench` draws of the content, beside the JSON."""
    from ..bench.record import write_bytes

    try:
        picture = getattr(import_module(f"..bench.{module}", __package__), function)(content)
    except ModuleNotFoundError as error:
        console.print(f'[yellow]note:[/] no plot without {error.name}: pip install "primaldual\\[demo]"')
        return
    if picture is not None:
        write_bytes(path.with_suffix(".png"), picture)


def _finish(content: dict[str, Any], path: Path, cases: int, fails: bool) -> None:
    """Say what was written; an exit where the run was stopped, or where a target is missed and that `fails`."""
    console.print(f"{content['wall_seconds']:.0f} s. Written: [bold]{_escape(str(path))}[/]", soft_wrap=True)
    if not content["complete"]:
        raise _fail(f"stopped after {len(content['records'])} of {cases}; those were written", 130)
    if fails and (missed := [target for target in content["targets"] if not target["met"]]):
        raise _fail(f"{len(missed)} of {len(content['targets'])} targets missed", 1)
