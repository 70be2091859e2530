"""`primaldual build`."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from .main import _escape, _fail, app, console


@app.command(epilog="**Examples**\n\n- `primaldual build`\n\n- `primaldual build --rebuild`")
def build(
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Compile again what is there already.")] = False,
) -> None:
    """Compile the part that is written in C++, which makes short sequences faster on a GPU.

    Attention and layers are then launched by C++ instead of Python, which takes the host far less time. Needs a C++
    compiler, ninja and Triton, and about half a minute. What is built is kept in the user's cache directory, or in
    that of `PRIMALDUAL_CACHE`, and used from then on; `PRIMALDUAL_NATIVE=0` leaves it out. It is for one version of
    torch, of Python and of this library: build again when one of them changes.
    """
    from ..kernels.native import library as native

    start = time.perf_counter()
    path = native.place()
    if path.is_file() and not rebuild:
        console.print(f"{_escape(str(path))} is there already", highlight=False, soft_wrap=True)
    else:
        try:
            native.build()
        except (native.BuildError, OSError) as error:
            raise _fail(error, 1) from None
        seconds = time.perf_counter() - start
        console.print(f"[green]ok[/] {_escape(str(path))}, {seconds:.0f} s", highlight=False, soft_wrap=True)
    if reason := native.load(path).missing():
        console.print(f"[yellow]note:[/] not used on this machine: {_escape(reason)}", soft_wrap=True)
