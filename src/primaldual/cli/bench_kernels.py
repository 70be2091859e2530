"""`primaldual bench kernels`, `primaldual bench layers`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from ..primal import mechanism
from . import bench
from .main import _fail
from .mechanism_options import scales_option
from .options import Device, Mechanisms, Plot, Quick, RecordFile, Repeats

if TYPE_CHECKING:
    from ..bench import Case

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
MECHANISMS = ("bn", "sh", "bn+sh", "linear")
PRESET_OPTIONS = {"preset", "output", "plot", "repeats", "quick", "device"}
"""What may be given beside a preset."""


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
    mechanisms: Mechanisms = ",".join(MECHANISMS),
    scales: Annotated[
        str | None, typer.Option(help="One per head, where a mechanism pools.", show_default=False)
    ] = None,
    steps: Annotated[
        str, typer.Option(help="`forward` (no gradients) and `forward+backward`.")
    ] = "forward,forward+backward",
    mode: Annotated[
        str | None, typer.Option(help="`eager`, `captured` (one CUDA graph), or `eager,captured`.", show_default=False)
    ] = None,
    impl: Annotated[str, typer.Option(help="The executor, or of a layer the route.")] = "auto",
    causal: Annotated[bool, typer.Option("--causal/--no-causal", help="Queries see earlier keys only.")] = False,
    dropout: Annotated[float, typer.Option(min=0.0, help="On the weights; the rival drops too.")] = 0.0,
    tf32: Annotated[bool, typer.Option("--tf32", help="Float32 products may round to tf32.")] = False,
    preset: Annotated[
        str | None,
        typer.Option(
            help="`targets`: what has to be reached on this kind of device; `language`: causal scaled heads, and whole "
            "layers with a gate and rotary positions beside a softmax layer in plain torch, compiled or not.",
            show_default=False,
        ),
    ] = None,
    output: RecordFile = None,
    plot: Plot = True,
    repeats: Repeats = None,
    quick: Quick = False,
    device: Device = None,
) -> None:
    from ..bench import table, targets
    from ..bench.measure import AttentionBench

    subject = str(ctx.info_name)
    try:
        where = bench.pick_device(device)
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
    long = preset == "targets" and where.type == "cpu"  # few cases, one of them of 15 s
    runner = AttentionBench(where, repeats or settings["repeats"], budget=0.5 if quick else 60.0 if long else 3.0)
    bench.measure_and_show(
        ctx, cases, runner.measure, where, output,
        describe=lambda case: f"{case.mechanism}, {case.length}, {case.step}, {case.mode}",
        tables=lambda content: table.preset_tables(content) if preset else table.results_tables(content),
        legend=lambda content: f"{table.LEGEND}\n{table.ceilings_line(content)}",
        summary=lambda content: (
            targets.verdicts(where.type, zip(cases, content["records"], strict=False), preset) if preset else {}
        ),
        first=lambda: runner.find_ceilings(cases), name=preset,
        picture=("plot", "targets_plot" if preset else "ratio_plot") if plot else None, targets_bind=bool(preset),
    )  # fmt: skip


METHOD = """

Ours and the rival run in turns after a warm-up: device events on CUDA, the wall clock on a CPU. The rival is the
fastest of torch's fused back ends for the same shape, dtype and step, in the same mode: eager ÷ eager, captured ÷
captured (the whole step is one CUDA graph). Inputs that a GPU's cache would hold are taken in turns from up to four
sets.

FLOPs are those of the expansion after its rewrites; backward adds 2.5 times the forward pass of an attention (twice
where it is linear). Bytes are the fewest: inputs read once, outputs written once. Both are shown as shares of a large
matrix product and a large copy (read + written), timed in the same run.

Peak memory (CUDA) is that of one eager step: inputs, parameters, and the most that it allocates beyond them.
"""
bench.app.command(
    "kernels",
    help="Measure `primaldual.attention` against torch's fused softmax attention." + METHOD,
    epilog="**Examples**\n\n- `primaldual bench kernels --quick`"
    "\n\n- `primaldual bench kernels --lengths 1024,4096 --mechanisms sh,linear --causal`"
    "\n\n- `primaldual bench kernels --preset targets` (exit status 1 if one is missed)"
    "\n\n- `primaldual bench kernels --preset language` (the same for layers of language models)",
)(measure)
bench.app.command(
    "layers",
    help="Measure `primaldual.MultiheadAttention`, projections included, against the same layer with softmax." + METHOD,
    epilog="**Examples**\n\n- `primaldual bench layers --quick`"
    "\n\n- `primaldual bench layers --lengths 4096 --batch 8 --mechanisms bn,bn+sh`",
)(measure)


def _preset(ctx: typer.Context, preset: str, device: torch.device) -> list[Case]:
    from ..bench import targets

    if preset not in targets.PRESETS:
        raise ValueError(f"--preset must be {' or '.join(targets.PRESETS)}, got {preset!r}")
    if others := [option for name, option, _ in bench.typed(ctx) if name not in PRESET_OPTIONS]:
        raise ValueError(f"--preset {preset} sets what is measured; leave out {', '.join(others)}")
    return targets.cases(device.type, preset)


def _grid(
    subject: str, device: torch.device, settings: dict[str, Any], lengths: str | None, batch: int | None, heads: int,
    head_dims: str | None, dtypes: str | None, mechanisms: str, scales: str | None, steps: str, mode: str | None,
    impl: str, causal: bool, dropout: float, tf32: bool,
) -> list[Case]:  # fmt: skip
    """The cases that the options ask for; a ValueError says what is wrong with them."""
    from ..bench import grid
    from ..bench.case import DTYPES, MODES, STEPS
    from ..ops import EXECUTORS
    from ..ops.layer import ROUTES

    def choices(option: str, text: str | None, default: str, among: tuple[str, ...]) -> tuple[str, ...]:
        if not text:
            return tuple(settings[default])
        chosen = tuple(bench.SHORT.get(part, part) for part in bench.parts(option, text, str))
        if wrong := [one for one in chosen if one not in among]:
            raise ValueError(f"{option} takes {', '.join(among)}; got {wrong[0]!r}")
        return chosen

    if dropout >= 1:
        raise ValueError(f"--dropout must be in [0, 1), got {dropout}")
    known = dict.fromkeys(("auto", *EXECUTORS, *(ROUTES if subject == "layers" else ())))
    if impl not in known:
        raise ValueError(f"--impl must be one of {', '.join(known)}; got {impl!r}")
    names = bench.parts("--mechanisms", mechanisms, str)
    for name in names:
        mechanism(name)  # raises, and says which there are
    modes = choices("--mode", mode, "modes", MODES)
    if device.type != "cuda" and ("captured" in modes or tf32):
        raise ValueError(f"{'--tf32' if tf32 else '--mode captured'} needs a CUDA device")
    return grid(
        "kernels" if subject == "kernels" else "layers",
        mechanisms=names,
        lengths=bench.parts("--lengths", lengths, bench.count_of) if lengths else settings["lengths"],
        head_dims=bench.parts("--head-dims", head_dims, bench.count_of) if head_dims else settings["head_dims"],
        dtypes=choices("--dtypes", dtypes, "dtypes", tuple(DTYPES)),
        steps=choices("--steps", steps, "steps", STEPS),
        modes=modes, tokens=settings["tokens"], batch=batch, heads=heads, scales=scales_option(scales), impl=impl,
        causal=causal, dropout=dropout, tf32=tf32,
    )  # fmt: skip
