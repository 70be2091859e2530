"""One configuration to measure, and grids of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

import torch

from ..primal import Primal, mechanism

Subject = Literal["kernels", "layers"]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
STEPS = ("forward", "forward+backward")
MODES = ("eager", "captured")


@dataclass(frozen=True)
class Case:
    """What is measured: a mechanism, a shape, and how it runs.

    Args:
        subject: "kernels" (`primaldual.attention`) or "layers" (`MultiheadAttention` of heads × head_dim channels).
        step: "forward" without gradients, or "forward+backward".
        mode: "eager", or "captured": the whole step is one CUDA graph.
        scales: of the heads, where the mechanism pools.
        rotary: with rotary positions; so has the rival (layers alone).
        tf32: matrix products of float32 may round to tf32.
    """

    subject: Subject
    mechanism: str
    length: int
    batch: int
    heads: int = 8
    head_dim: int = 64
    dtype: str = "bfloat16"
    step: str = "forward+backward"
    mode: str = "captured"
    scales: tuple[int, ...] | None = None
    impl: str = "auto"
    causal: bool = False
    dropout: float = 0.0
    tf32: bool = False
    rotary: bool = False

    @property
    def primal(self) -> Primal:
        """The mechanism, with the scales where it pools, and with rotary positions where the case has them."""
        pools = self.scales is not None and "sh" in self.mechanism
        options: dict[str, Any] = {"scales": self.scales} if pools else {}
        return mechanism(self.mechanism, rotary=self.rotary, **options)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of every tensor."""
        return DTYPES[self.dtype]

    @property
    def trains(self) -> bool:
        """Whether the step has a backward pass."""
        return self.step == "forward+backward"

    @property
    def arithmetic(self) -> str:
        """The matrix unit that sets the ceiling: the dtype, or tf32."""
        return "tf32" if self.tf32 and self.dtype == "float32" else self.dtype

    @property
    def softmax(self) -> Case:
        """The same with softmax attention: the rival's case."""
        return replace(self, mechanism="softmax", scales=None, impl="auto")


def grid(
    subject: Subject,
    *,
    mechanisms: Iterable[str],
    lengths: Iterable[int],
    head_dims: Iterable[int],
    dtypes: Iterable[str],
    steps: Iterable[str] = STEPS,
    modes: Iterable[str],
    tokens: int,
    batch: int | None = None,
    heads: int = 8,
    scales: Sequence[int] | None = None,
    impl: str = "auto",
    causal: bool = False,
    dropout: float = 0.0,
    tf32: bool = False,
) -> list[Case]:
    """Every combination; `batch` is `tokens` / length unless given, at least 1."""
    scales = tuple(scales) if scales else None
    return [
        Case(
            subject, name, length, batch or max(1, tokens // length), heads, head_dim, dtype, step, mode, scales, impl,
            causal, dropout, tf32,
        )
        for dtype, head_dim, mode, step, name, length in product(dtypes, head_dims, modes, steps, mechanisms, lengths)
    ]  # fmt: skip
