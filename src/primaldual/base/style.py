"""The look that all figures share, and how they leave matplotlib."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

INK, SOFT, LINE = "#1b1f27", "#5b6472", "#e3e6eb"
COLOURS = {"softmax": "#7a828e", "bn": "#0072b2", "sh": "#d9820f", "bn+sh": "#009e73"}
"""One colour per mechanism in every figure; told apart with colour-blind eyes too."""
PALETTE = COLOURS | {
    "linear": "#cc79a7", "linear-bn": "#a35a85", "linear-sh": "#e39ac3", "linear-bn+sh": "#7d4465",
    "sparse": "#8a5a00", "sparse-bn": "#b98220", "sparse-sh": "#5e3d00", "sparse-bn+sh": "#d6a95c",
    "conv1d": "#56b4e9", "conv2d": "#2f86b8", "qk-norm": "#9b3d2e",
}  # fmt: skip
"""Of more mechanisms."""

_RC: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "grid.color": LINE,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "svg.hashsalt": "primaldual",  # the same figure gives the same bytes
}


@contextmanager
def style() -> Iterator[None]:
    """Figures made and saved inside look alike; matplotlib's settings outside are left alone."""
    with matplotlib.rc_context(_RC):
        yield


def figure(width: float, height: float) -> Figure:
    """An empty figure in inches, free of any window system."""
    return Figure(figsize=(width, height), layout="constrained")


def colour(mechanism: str) -> str:
    """The colour of a mechanism."""
    return COLOURS.get(mechanism, INK)


def bare(axes: Axes) -> None:
    """No ticks and no frame."""
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def svg(drawing: Figure) -> bytes:
    """As SVG, without a date."""
    buffer = io.BytesIO()
    drawing.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def png(drawing: Figure, dpi: int) -> bytes:
    """As PNG."""
    buffer = io.BytesIO()
    drawing.savefig(buffer, format="png", dpi=dpi)
    # 256 colours are enough for a drawing, and a third of the bytes
    image = Image.open(buffer).convert("RGB").quantize(256)
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()
