"""What is run against what: primals, cases, and the comparison with the reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from primaldual import Primal, attention, mechanism, mechanisms
from primaldual.ops import EXECUTORS, UnsupportedError, plan
from primaldual.primal import (
    BatchNorm,
    DepthwiseConv1d,
    EluPlusOne,
    Fixed,
    Forget,
    Gated,
    Gaussian,
    KernelSum,
    Laplace,
    Polynomial,
    Pooled,
    RandomFeatures,
    Recenter,
    RmsNorm,
    Rotary,
    Scale,
    Sparse,
    Strided,
    Taylor,
    Unit,
    Window,
)

HEADS = 6
SCALES = (1, 2, 1, 3, 2, 8)  # heads of one scale do not stand side by side
ON_CUDA = ("ragged", "recentred", "mixed")
"""Executors that a CPU does not have."""
FAST = [name for name in EXECUTORS if name != "reference" and name not in ON_CUDA]

# a stride of 32 would hide next to nothing at the lengths of a test
NAMED: dict[str, Primal] = {
    name: mechanism(name, **({"stride": 3} if name.startswith("sparse") else {})) for name in mechanisms()
}
VARIANTS: dict[str, Primal] = {
    "bn-full": mechanism("bn", full=True),
    "bn-half": mechanism("bn", beta=0.5),
    "bn-learned": mechanism("bn+sh", learnable=True),
    "bn-full+sh": mechanism("bn+sh", full=True, scales=SCALES),
    "sh-uneven": mechanism("bn+sh", scales=SCALES),
    "sh-prefix": mechanism("bn+sh", prefix=3),
    "sh-max": mechanism("bn+sh", how="max"),
    "sh-conv": mechanism("bn+sh", how="conv"),
    "sh-kmeans": mechanism("bn+sh", how="kmeans"),
    "sh-conv1d-causal": Primal(inputs=(DepthwiseConv1d(3, causal=True),), training_set=Pooled(SCALES)),
    "alibi-bn+sh": Primal(features=Laplace(), inputs=(Recenter(0.5),), training_set=Pooled(SCALES, prefix=2)),
    "alibi-rms": Primal(features=Laplace(), inputs=(Rotary(7.0), RmsNorm())),
    "alibi-unit": Primal(features=Laplace(), normalizer=Unit(), training_set=Pooled(SCALES)),
    "alibi-sparse": Primal(features=Laplace(), training_set=Sparse(Window(3), Pooled(SCALES))),
    "conv1d-each": mechanism("conv1d", size=3, channels="each"),
    "rotary": mechanism("bn+sh", rotary=Rotary(7.0), scales=SCALES),  # fast enough to show at a test's lengths
    "linear-rotary": Primal(mechanism("linear").features, inputs=(Rotary(7.0), Scale(1.5, learnable=True))),
    "qk-norm-tempered": mechanism("qk-norm", temperature=True),
    "scaled-sh": Primal(inputs=(Scale(1.5, learnable=True),), training_set=Pooled(SCALES)),
    "rms-then-bn": Primal(inputs=(RmsNorm(), Recenter(0.3))),
    "bn-then-rms": Primal(inputs=(Recenter(0.3), RmsNorm())),
    "unit": Primal(normalizer=Unit()),
    "sink-one": Primal(inputs=(Recenter(0.5),), normalizer=KernelSum(1)),
    "sink-sh": Primal(normalizer=KernelSum("learned"), training_set=Pooled(SCALES)),
    "sink-gate": Primal(normalizer=Gated(KernelSum("learned")), features=EluPlusOne()),
    "forget-sh": Primal(weights=Forget(), inputs=(Recenter(0.5),), training_set=Pooled(SCALES, prefix=2)),
    "forget-linear": Primal(EluPlusOne(), Gated(), weights=Forget(), training_set=Pooled(SCALES)),
    "forget-kmeans": Primal(weights=Forget(), training_set=Pooled(SCALES, "kmeans")),
    "forget-gaussian": Primal(Gaussian(), weights=Forget(), training_set=Pooled(SCALES)),
    "forget-sparse": Primal(weights=Forget(), training_set=Sparse(Strided(3))),
    "gaussian-sh": Primal(Gaussian(0.8), inputs=(BatchNorm(),), training_set=Pooled(SCALES)),
    "gaussian-sink": Primal(Gaussian(), KernelSum("learned")),
    "polynomial-sh": Primal(Polynomial(3, 5.0), inputs=(RmsNorm(),), training_set=Pooled(SCALES)),
    "linear-unit": Primal(features=Taylor(2), normalizer=Unit()),
    "linear-taylor": mechanism("linear-sh", features=Taylor(2), prefix=2),
    "linear-random": mechanism("linear-bn", features=RandomFeatures(8)),
    "linear-full+sh": mechanism("linear-bn+sh", full=True, scales=SCALES),
    "linear-rms": Primal(features=mechanism("linear").features, inputs=(RmsNorm(),), training_set=Pooled(SCALES)),
    "sparse-fixed": mechanism("sparse-bn+sh", pattern=Fixed(4, 2), scales=SCALES),
    "sparse-window": mechanism("sparse-bn+sh", pattern=Window(3)),
    "sparse-diagonal": mechanism("sparse", pattern=Window(0)),
    "sparse-strided": mechanism("sparse-sh", pattern=Strided(2), scales=SCALES),
    "sparse-by-length": mechanism("sparse-bn", stride="sqrt"),
    "sparse-full-prefix": Primal(inputs=(BatchNorm(),), training_set=Sparse(Strided(3), Pooled(SCALES, prefix=2))),
    "sparse-linear": Primal(features=mechanism("linear").features, training_set=Sparse(Window(2))),
}
PRIMALS = NAMED | VARIANTS


@dataclass(frozen=True)
class Case:
    """A shape and a mask; its name is the test's id."""

    queries: int
    keys: int
    mask: str = "none"
    causal: bool = False
    offset: int = 0
    scale: float | None = None

    def __str__(self) -> str:
        name = f"L{self.queries}-S{self.keys}-{self.mask}{'-causal' if self.causal else ''}"
        return name + f"-from{self.offset}" * bool(self.offset) + f"-scale{self.scale}" * (self.scale is not None)

    def arguments(self, batch: int, dtype: torch.dtype, generator: torch.Generator) -> dict:
        """The mask arguments of `attention`."""
        L, S = self.queries, self.keys
        hide = torch.rand(batch, S, generator=generator) < 0.4
        arguments: dict = {"is_causal": self.causal, "query_offset": self.offset, "scale": self.scale}
        if self.mask == "padding":
            hide[0] = True  # a row with nothing to see
            arguments["key_padding_mask"] = hide
        elif self.mask == "bias":
            bias = torch.randn(batch, S, generator=generator, dtype=torch.float64)
            arguments["key_padding_mask"] = bias.masked_fill(hide, -torch.inf).to(dtype)
        elif self.mask == "attn":
            arguments["attn_mask"] = torch.rand(L, S, generator=generator) < 0.3
        elif self.mask == "attn-bias":
            shown = torch.randn(batch, HEADS, L, S, generator=generator, dtype=torch.float64)
            hidden = torch.rand(batch, HEADS, L, S, generator=generator) < 0.3
            arguments["attn_mask"] = shown.masked_fill(hidden, -torch.inf).to(dtype)
            arguments["key_padding_mask"] = hide
        return arguments


SHAPES = [(1, 1), (9, 9), (16, 16), (37, 37), (5, 13), (16, 7)]
CASES = [
    Case(L, S, mask, causal) for L, S in SHAPES for mask in ("none", "padding", "bias") for causal in (False, True)
]
CASES += [Case(L, S, mask) for L, S in SHAPES for mask in ("attn", "attn-bias")]
CASES += [Case(1, 13, mask, True, 12) for mask in ("none", "bias")]  # a step of decoding
CASES += [Case(5, 13, mask, True, offset) for offset in (3, 8) for mask in ("none", "padding")]
CASES += [Case(5, 13, "none", False, 8), Case(16, 16, "none", False, 0, 0.7), Case(5, 13, "padding", True, 8, 0.2)]


def inputs(case: Case, dtype: torch.dtype = torch.float64, rounded: torch.dtype | None = None, dim: int = 4) -> tuple:
    """(q, k, v) that require gradients, and the mask arguments; `rounded` first, where it is given."""
    batch, generator = 2, torch.Generator().manual_seed(0)
    shapes = ((case.queries, dim), (case.keys, dim), (case.keys, dim + 1))
    qkv = [torch.randn(batch, HEADS, n, d, generator=generator, dtype=torch.float64) for n, d in shapes]
    masks = case.arguments(batch, rounded or dtype, generator)
    masks = {n: m.to(dtype) if isinstance(m, Tensor) and m.is_floating_point() else m for n, m in masks.items()}
    return tuple(x.to(rounded or dtype).to(dtype).requires_grad_() for x in qkv), masks


def parameters(
    primal: Primal, case: Case, dtype: torch.dtype = torch.float64, rounded: torch.dtype | None = None, dim: int = 4,
    batch: int = 2,
) -> dict:  # fmt: skip
    """What the primal learns, and has for every token, moved away from its start, requiring gradients."""
    generator = torch.Generator().manual_seed(1)
    moved = {}
    for name, start in primal.learned(HEADS, dim).items():
        moved[name] = start.double() + 0.3 * torch.randn(start.shape, generator=generator, dtype=torch.float64)
    for name, part in primal.made(HEADS, dim + 1).items():
        tokens = case.queries if part.of == "query" else case.keys
        shape = (batch, HEADS, tokens, *part.start.shape[1:])
        start = part.start.double()[:, None] + torch.randn(shape, generator=generator, dtype=torch.float64)
        moved[name] = part.function(start)
    return {n: x.to(rounded or dtype).to(dtype).requires_grad_() for n, x in moved.items()}


def shortened(primal: Primal, given: dict, length: int) -> dict:
    """The same of so many first tokens."""
    made = primal.made(HEADS, 5)
    return {name: x[:, :, :length] if name in made else x for name, x in given.items()}


def outputs_and_gradients(
    primal: Primal, case: Case, impl: str, dtype: torch.dtype = torch.float64, rounded: torch.dtype | None = None
) -> dict[str, Tensor]:
    """The output, and the gradient of every input and parameter for one fixed upstream gradient."""
    qkv, masks = inputs(case, dtype, rounded)
    learned = parameters(primal, case, dtype, rounded)
    out = attention(*qkv, primal, impl=impl, parameters=learned, **masks)
    assert isinstance(out, Tensor)
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    leaves = {"q": qkv[0], "k": qkv[1], "v": qkv[2]} | learned
    up = up.to(rounded or dtype).to(dtype)
    gradients = torch.autograd.grad(out, list(leaves.values()), up, allow_unused=True)
    zeros = (torch.zeros_like(x) if g is None else g for x, g in zip(leaves.values(), gradients, strict=True))
    return {"out": out.detach()} | dict(zip((f"grad {n}" for n in leaves), zeros, strict=True))


def exists(primal: Primal, case: Case) -> bool:
    """Whether the semantics define this case: a causal form, a mask that heads and maps take, a grid that fits."""
    if case.causal and primal.causal_refusal(HEADS):
        return False
    if (case.offset and primal.mixing_maps) or (case.scale is not None and not primal.features.scaled):
        return False
    per_query = case.mask.startswith("attn")
    if per_query and (primal.mixing_maps or any(s > 1 for s in primal.training_set.head_scales(HEADS))):
        return False
    squares = (1, 9, 16)
    return "Conv2d" not in repr(primal) or (case.queries in squares and case.keys in squares)


def runs(primal: Primal, case: Case, impl: str, dtype: torch.dtype = torch.float64) -> bool:
    """Whether this executor takes the case."""
    if not exists(primal, case):
        return False
    qkv, masks = inputs(case, dtype)
    try:
        return plan(*qkv, primal, impl=impl, **masks).impl == impl
    except UnsupportedError:
        return False


def relative_error(value: Tensor, truth: Tensor) -> float:
    """The largest deviation, relative to the largest entry of the truth (at least 1)."""
    return float((value.double() - truth).abs().max() / truth.abs().max().clamp(min=1.0)) if truth.numel() else 0.0


PAIRS = [(name, impl) for name, primal in PRIMALS.items() for impl in FAST if runs(primal, Case(16, 16), impl)]
FASTEST = dict.fromkeys(PRIMALS, "auto") | dict(reversed(PAIRS))
"""The most special executor that runs each primal; `auto` may prefer another at the lengths of a test."""
