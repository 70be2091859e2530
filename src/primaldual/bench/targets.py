"""What must be reached on an H200 and on a CPU, and what would be a dream: the targets of each preset."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from .case import Case
from .session import Content, Measurement

SCALES = (1, 1, 2, 2, 4, 4, 8, 8)
BATCH = {128: 32, 512: 16, 1024: 8, 4096: 8, 16384: 4}


@dataclass(frozen=True)
class Target:
    """A figure of one case's record, and its bounds.

    Args:
        name: what the reader sees.
        case: what is measured.
        figure: the key of the record.
        must: the bound that has to hold.
        dream: the bound to hope for, if there is one.
        at_least: the bound is from below.
    """

    name: str
    case: Case
    figure: str
    must: float
    dream: float | None = None
    at_least: bool = False

    def value(self, record: Measurement) -> float | None:
        """The measured figure; None where the case was refused or the figure does not exist."""
        return record.get(self.figure)

    def met(self, record: Measurement, bound: float | None) -> bool:
        """Whether the figure is within a bound."""
        value = self.value(record)
        if value is None or bound is None:
            return False
        return value >= bound if self.at_least else value <= bound


def _kernels() -> Iterator[Target]:
    sh = Case("kernels", "sh", 128, 32, scales=SCALES)
    must = {128: 0.90, 512: 0.62, 1024: 0.58, 4096: 0.50, 16384: 0.475}
    dream = {128: 0.60, 512: 0.50, 1024: 0.49, 4096: 0.48, 16384: 0.47}
    for length in must:
        case = replace(sh, length=length, batch=BATCH[length])
        yield Target("SH", case, "ratio", must[length], dream[length])
    for length, most, hoped in ((128, 1.10, 0.8), (1024, 0.80, 0.6), (4096, 0.55, 0.5)):
        case = replace(sh, length=length, batch=BATCH[length], mode="eager")
        yield Target("SH", case, "ratio", most, hoped)
    lra = replace(sh, length=4096, batch=32, heads=2, head_dim=32, scales=(1, 2))
    yield Target("SH, LRA shape", lra, "ratio", 0.74, 0.72)
    scp1 = replace(sh, length=896, batch=64, head_dim=16)
    yield Target("SH, SelfRegulationSCP1 shape", scp1, "ratio", 0.50, 0.40)
    single = replace(scp1, dtype="float32", tf32=True)
    yield Target("SH, SelfRegulationSCP1 shape, tf32", single, "ratio", 0.35, 0.15)
    linear = Case("kernels", "linear", 65536, 4, step="forward")
    yield Target("linear, share of copy bandwidth", linear, "bytes_share", 0.60, 0.85, at_least=True)


def _layers() -> Iterator[Target]:
    bn = {128: (1.10, 1.03), 1024: (1.05, 1.02), 4096: (1.02, 1.00)}
    both = {1024: (0.80, 0.65), 4096: (0.60, 0.50)}
    for mode in ("captured", "eager"):
        for name, bounds in (("bn", bn), ("bn+sh", both)):
            for length, (must, dream) in bounds.items():
                scales = SCALES if name == "bn+sh" else None
                case = Case("layers", name, length, BATCH[length], mode=mode, scales=scales)
                yield Target(f"{name.upper()} layer", case, "ratio", must, dream)
    for step, use in (("forward+backward", "training"), ("forward", "inference")):
        case = Case("layers", "bn+sh", 4096, 8, step=step, mode="eager", scales=SCALES)
        yield Target(f"BN+SH {use} memory ÷ fused", case, "memory_ratio", 0.90)
        yield Target(f"BN+SH {use} memory ÷ materialised", case, "memory_ratio_materialised", 0.25)


def _on_a_cpu() -> Iterator[Target]:
    for name, length, batch, must in (("bn", 2048, 4, 1.10), ("sh", 2048, 4, 0.60), ("linear", 16384, 1, 0.05)):
        scales = SCALES if name == "sh" else None
        case = Case("kernels", name, length, batch, dtype="float32", mode="eager", scales=scales)
        yield Target("linear" if name == "linear" else name.upper(), case, "ratio", must)


TARGETS: dict[str, tuple[Target, ...]] = {"cuda": (*_kernels(), *_layers()), "cpu": tuple(_on_a_cpu())}
"""By the kind of device; those of "cuda" are stated for an H200."""


def _language() -> Iterator[Target]:
    sh = Case("kernels", "sh", 1024, 32, scales=SCALES, causal=True)
    for mode in ("captured", "eager"):
        for length, batch, must in ((1024, 32, 0.75), (4096, 8, 0.62), (16384, 2, 0.55)):
            yield Target("causal SH", replace(sh, length=length, batch=batch, mode=mode), "ratio", must)
        for length, batch, must in ((1024, 32, 1.0), (4096, 8, 0.75)):
            yield Target(
                "gate + rotary + SH layer", replace(_TODAY, length=length, batch=batch, mode=mode), "ratio", must
            )


_TODAY = Case("layers", "gate+sh", 1024, 32, scales=SCALES, causal=True, rotary=True)
"""What a language model is made of today, with scaled heads."""


def _parts() -> Iterator[Case]:
    """The same layer without one part or both, whose times say what each takes."""
    for length, batch in ((1024, 32), (4096, 8)):
        for name, rotary in (("gate+sh", False), ("sh", True), ("sh", False)):
            yield replace(_TODAY, mechanism=name, rotary=rotary, length=length, batch=batch)


def _small() -> Iterator[Case]:
    """What a CPU measures of these."""
    for length, batch in ((256, 4), (512, 2)):
        shape: dict[str, Any] = {"length": length, "batch": batch, "dtype": "float32", "mode": "eager"}
        yield Case("kernels", "sh", scales=SCALES, causal=True, **shape)
        yield replace(_TODAY, **shape)


LANGUAGE: dict[str, tuple[Target, ...]] = {"cuda": tuple(_language()), "cpu": ()}
"""Layers of a language model; on a CPU there is nothing that must be reached."""

PRESETS = {"targets": TARGETS, "language": LANGUAGE}
"""By name."""

_BESIDE: dict[str, dict[str, tuple[Case, ...]]] = {"language": {"cuda": tuple(_parts()), "cpu": tuple(_small())}}
"""What a preset measures beside its targets."""


def cases(device: str, preset: str = "targets") -> list[Case]:
    """Every case of a preset for a kind of device, once."""
    beside = _BESIDE.get(preset, {}).get(device, ())
    return list(dict.fromkeys([*(target.case for target in PRESETS[preset][device]), *beside]))


def verdicts(device: str, done: Iterable[tuple[Case, Measurement]], preset: str = "targets") -> Content:
    """Each target of a preset whose case was measured: its figure beside its bounds."""
    records = dict(done)
    return {
        "targets": [
            {
                "name": target.name, "figure": target.figure, "value": target.value(records[target.case]),
                "must": target.must, "dream": target.dream, "at_least": target.at_least,
                "met": target.met(records[target.case], target.must),
                "dreamt": target.met(records[target.case], target.dream),
                "record": list(records).index(target.case),
            }
            for target in PRESETS[preset][device]
            if target.case in records
        ]
    }  # fmt: skip
