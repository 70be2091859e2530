"""What the compiler makes of the kernels on Hopper: registers, spills, loops. No GPU is needed.

    python benchmarks/machine_code.py                      # a table, about two minutes
    python benchmarks/machine_code.py --only bn+sh         # the forms whose names hold this
    PYTHONPATH=other/src python benchmarks/machine_code.py --json other.json   # another checkout's kernels
    python benchmarks/machine_code.py --against other.json                     # what differs here

The Python path of every form is walked with its launches noted down, which compiles the kernels and does not launch
them; the disassembler that comes with Triton reads what came out. `spilled`: bytes a thread keeps in memory, and after
the plus how many instructions of its loops go there. `programs`: as many as fit on a multiprocessor. `code`: all
instructions, and a digest of them; `loops`: those of the longest ones.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from rich.console import Console
from rich.progress import track
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from primaldual import Primal, mechanism
from primaldual.kernels import encoder, launching
from primaldual.kernels.kept import Kept
from primaldual.kernels.linear.attention import linear_attention
from primaldual.kernels.native.notes import Launch, noted
from primaldual.kernels.projection import grouped, recentred, unpooled
from primaldual.kernels.projection.grouped import Groups
from primaldual.kernels.ragged import launch as ragged_launch
from primaldual.ops.plan import execute
from primaldual.ops.problem import state

Row = dict[str, Any]
SHARED, REGISTERS, THREADS = 233472, 65536, 2048
"""Of a multiprocessor. Of the shared memory, in bytes, every program takes 1024 more than it asks for."""


@dataclass(frozen=True)
class Form:
    """A kind of call that has kernels of its own."""

    mechanism: str
    length: int
    dim: int = 64
    dtype: str = "bfloat16"
    dropout: float = 0.0
    causal: bool = False
    padded: bool = False
    window: int = 8
    """The longest."""

    @property
    def name(self) -> str:
        words = [self.mechanism, f"{self.length} × {self.dim}", self.dtype]
        words += [word for word in ("dropout", "causal", "padded") if getattr(self, word)]
        return ", ".join(words + [f"windows of {self.window}"] * (self.window > 8))

    @property
    def primal(self) -> Primal:
        pools = {"scales": (1, 1, 2, 2, 4, 4, self.window, self.window)} if "sh" in self.mechanism else {}
        return mechanism(self.mechanism, **pools)


@dataclass(frozen=True)
class Linear:
    """A call of linear attention: elu + 1, or as many random features as a head has dimensions."""

    dtype: str
    causal: bool
    random: bool

    @property
    def name(self) -> str:
        words = ["linear attention", self.dtype, *["causal"] * self.causal, *["random features"] * self.random]
        return ", ".join(words)


@dataclass(frozen=True)
class Projection:
    """Queries, keys and values of a layer, and their gradients."""

    way: str
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.way} projection, {self.dtype}"


@dataclass(frozen=True)
class Training:
    """A step: embedding, one layer, head and update."""

    norm: str
    dtype: str
    dropout: float

    @property
    def name(self) -> str:
        return ", ".join(["training", f"{self.norm} norm", self.dtype, *["dropout"] * bool(self.dropout)])


AnyForm = Form | Linear | Projection | Training
FORMS: tuple[AnyForm, ...] = (
    *(Form("sh", length) for length in (16, 128, 512, 1024)),
    *(Form("sh", 1024, dim) for dim in (16, 32, 128)),
    *(Form("sh", 896, dim, dtype) for dtype in ("float32", "tf32") for dim in (16, 64, 128)),
    *(Form("bn+sh", length, dim) for length in (128, 1024) for dim in (16, 64)),
    *(Form(name, 896, dim, dropout=0.1) for name in ("softmax", "sh", "bn+sh", "sparse") for dim in (8, 16)),
    *(Form("bn+sh", 896, dim, dropout=0.1, padded=True) for dim in (8, 64)),
    *(Form("sh", 1024, 64, dtype, window=512) for dtype in ("bfloat16", "float32")),
    Form("softmax", 1000, causal=True), Form("sh", 1000, causal=True), Form("softmax", 1024),
    *(Linear(dtype, causal, random) for dtype in ("float32", "bfloat16")
      for causal, random in ((False, False), (True, False), (False, True))),
    *(Projection(way, dtype) for way in ("recentred", "unpooled", "grouped") for dtype in ("float32", "bfloat16")),
    *(Training(norm, *how) for norm in ("batch", "layer") for how in (("float32", 0.0), ("bfloat16", 0.1))),
)  # fmt: skip


class Hopper:
    """A driver of Triton's for a device that is not there: it takes kernels, and says that they are loaded."""

    def __init__(self) -> None:
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (1, 1, 0, 0, 1024), get_device_properties=lambda _: {"max_shared_mem": SHARED - 1024}
        )

    def launcher_cls(self, *_: Any) -> Any:
        return lambda *_: None

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def attend(form: Form) -> None:
    single = form.dtype in ("float32", "tf32")
    dtype = torch.float32 if single else getattr(torch, form.dtype)
    q, k, v = (torch.randn(8, 8, form.length, form.dim).to(dtype).requires_grad_() for _ in range(3))
    padding = torch.arange(form.length).expand(8, -1) >= form.length - 1 if form.padded else None
    problem = state(q, k, v, form.primal, is_causal=form.causal, dropout_p=form.dropout, key_padding_mask=padding)
    out, _ = execute(problem, "ragged")
    torch.autograd.grad(out, (q, k, v), torch.empty_like(out))


def attend_linearly(form: Linear) -> None:
    dtype = getattr(torch, form.dtype)
    q, k, v = (torch.randn(2, 4, 1000, 64).to(dtype).requires_grad_() for _ in range(3))
    shift, weight = torch.zeros(2, 4, 64, requires_grad=True), torch.ones(2, 1, 1000)
    omega = torch.randn(64, 64).to(dtype) if form.random else None
    out, _ = linear_attention(q, k, v, shift, torch.ones(2, 4, 64), omega, weight, form.causal)
    torch.autograd.grad(out, (q, k, v, shift), torch.empty_like(out))


def project(form: Projection) -> None:
    dtype = getattr(torch, form.dtype)
    width, heads, tokens = 128, 4, 300
    x, weight, bias = (
        torch.randn(*shape).to(dtype).requires_grad_()
        for shape in ((2, tokens, width), (3 * width, width), (3 * width,))
    )
    beta = torch.ones(heads, requires_grad=True)
    groups = Groups(((1, (0, 1)), (2, (2,)), (4, (3,))), 2, tokens, heads, width // heads)
    found: tuple[torch.Tensor | None, ...]
    if form.way == "recentred":
        found = recentred.RecentredProjection.apply(x, weight, bias, beta, torch.ones(2, tokens), 1.0, heads)
    else:
        found = {"unpooled": unpooled, "grouped": grouped}[form.way].project(x, weight, bias, groups, True, 1.0, beta)
    found = tuple(out for out in found if out is not None and out.requires_grad)
    torch.autograd.grad(found, (x, weight, bias, beta), [torch.empty_like(out) for out in found])


def train(form: Training) -> None:
    dtype = getattr(torch, form.dtype)
    members, cases, length, width, hidden, outputs = 2, 8, 50, 64, 128, 5

    def weights(*shape: int) -> torch.Tensor:
        return torch.randn(members, *shape).to(dtype).requires_grad_()

    drop = encoder.Dropout(form.dropout, torch.zeros(1, dtype=torch.int32)) if form.dropout else None
    moments = (torch.zeros(members, width), torch.ones(members, width)) if form.norm == "batch" else (None, None)
    ones = torch.ones(members, width, requires_grad=True)
    norm = encoder.Norm(ones, torch.zeros(members, width, requires_grad=True), *moments)
    x = encoder.embed(weights(cases * length, width), weights(width), weights(length, width), 8.0, drop)
    branch, x = encoder.linear_beside(x, weights(width, width), weights(width))
    x = encoder.add_norm(x, branch, weights(width, width), weights(width), norm, drop, True)
    x = encoder.feed_forward(
        x, weights(hidden, width), weights(hidden), weights(width, hidden), weights(width), norm, (drop, drop), True
    )
    padding = torch.zeros(members, cases, length, dtype=torch.bool)
    out = encoder.head(
        x.unflatten(1, (cases, length)), weights(outputs, length * width), weights(outputs), padding, drop
    )
    out.sum().backward()
    matrix, gradient, mean, square = torch.zeros(4, members, 5000)
    reduced = torch.zeros(members, 1000, dtype=torch.bfloat16)
    encoder.clipped_update(
        matrix, gradient, mean, square, reduced, torch.ones(members), 4.0, torch.ones(members, dtype=torch.bool),
        torch.ones(10, 5), torch.zeros((), dtype=torch.int64), 0.001,
    )  # fmt: skip


def launches(form: AnyForm) -> list[Launch]:
    """Those of both passes."""
    with ExitStack() as stack:
        for where, name, instead in (
            (launching, "_ready", Kept(1024)),
            (launching, "starts_early", lambda device: True),
            (launching, "on_cpu", lambda: True),
            (torch.cuda, "current_device", lambda: 0),
            (ragged_launch, "precision", lambda q: "tf32" if form.dtype == "tf32" else "ieee"),
        ):
            stack.enter_context(patch.object(where, name, instead))
        steps = stack.enter_context(noted())
        match form:
            case Form():
                attend(form)
            case Linear():
                attend_linearly(form)
            case Projection():
                project(form)
            case Training():
                train(form)
        return [step for step in steps if isinstance(step, Launch)]


def examine(form: AnyForm) -> Iterator[Row]:
    """A row for every launch; a kernel that is launched again has a number behind its name."""
    seen: Counter[str] = Counter()
    for step in launches(form):
        seen[step.name] += 1
        compiled = step.ready.compiled
        code = instructions(disassembled(compiled.asm["cubin"], "-sass"))
        usage = dict(re.findall(r"(\w+):(\d+)", disassembled(compiled.asm["cubin"], "-res-usage")))
        registers, spilled = int(usage["REG"]), int(usage["STACK"])
        threads, shared = 32 * compiled.metadata.num_warps, compiled.metadata.shared
        fit = REGISTERS // (-(-registers // 8) * 8 * threads), SHARED // (shared + 1024), THREADS // threads
        yield {
            "form": form.name, "kernel": step.name if seen[step.name] == 1 else f"{step.name} {seen[step.name]}",
            "registers": registers, "spilled": spilled, "shared": shared, "programs": min(fit), "code": len(code),
            "digest": digest(code), "loops": loops(code),
        }  # fmt: skip


def disassembled(cubin: bytes, how: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, how, file.name], capture_output=True, text=True, check=True).stdout


def instructions(listing: str) -> list[tuple[int, str]]:
    """Addresses and what stands there."""
    return [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]*);", listing)]


def digest(code: list[tuple[int, str]]) -> str:
    """Equal where all instructions are."""
    return sha256("\n".join(text for _, text in code).encode()).hexdigest()[:8]


def loops(code: list[tuple[int, str]]) -> list[dict[str, int]]:
    """Whatever lies between a branch back and where it goes, longest first: instructions, and those that spill."""
    number = {at: n for n, (at, _) in enumerate(code)}
    found = []
    for n, (at, text) in enumerate(code):
        branch = re.search(r"\bBRA\S*\s.*?0x([0-9a-f]+)", text)
        if branch and (to := int(branch[1], 16)) < at and to in number:
            body = [text for _, text in code[number[to] : n + 1]]
            spills = sum(bool(re.search(r"\b(LDL|STL)\b", text)) for text in body)
            found.append({"instructions": len(body), "spills": spills})
    return sorted(found, key=lambda loop: -loop["instructions"])


def cells(row: Row | None) -> list[str]:
    """What a row of the table shows; of a launch that is not there, nothing."""
    if row is None:
        return ["–"] * 6
    inside = sum(loop["spills"] for loop in row["loops"])
    return [
        str(row["registers"]), f"{row['spilled']} + {inside}" if inside else str(row["spilled"]), str(row["shared"]),
        str(row["programs"]), f"{row['code']} {row['digest']}",
        " ".join(str(loop["instructions"]) for loop in row["loops"][:4]) or "–",
    ]  # fmt: skip


def differences(before: list[Row], now: list[Row]) -> list[list[str]]:
    """Of the forms that both have, what was and what is; a launch that is new or gone, too."""
    was, found = ({(row["form"], row["kernel"]): row for row in rows} for rows in (before, now))
    shared = {row["form"] for row in before} & {row["form"] for row in now}
    lines = []
    for key in dict.fromkeys([*found, *was]):
        one, other = cells(was.get(key)), cells(found.get(key))
        if key[0] in shared and one != other:
            lines.append([*key, *(a if a == b else f"{a} → {b}" for a, b in zip(one, other, strict=True))])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="forms whose names hold this")
    parser.add_argument("--json", type=Path, help="write what was found")
    parser.add_argument("--against", type=Path, help="what --json wrote before: only what differs is shown")
    asked = parser.parse_args()
    if launching.interpreted():
        parser.error("TRITON_INTERPRET is set: then Triton compiles nothing")
    if not (forms := [form for form in FORMS if asked.only in form.name]):
        parser.error(f"no form's name holds {asked.only!r}; such as {FORMS[0].name!r}")
    try:
        before = json.loads(asked.against.read_text()) if asked.against else None
    except (OSError, ValueError) as error:
        parser.error(f"--against takes a file that --json wrote: {error}")
    driver.set_active(Hopper())
    rows, refused = [], []
    for form in track(forms, console=Console(stderr=True), transient=True):
        try:
            rows += examine(form)
        except OutOfResources as error:
            refused.append(f"{form.name}: {error}")
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1) + "\n")
    table = Table("form", "kernel", "registers", "spilled", "shared", "programs", "code", "loops")
    lines = [[row["form"], row["kernel"], *cells(row)] for row in rows] if before is None else differences(before, rows)
    for line in lines:
        table.add_row(*line)
    Console(width=None if Console().is_terminal else 180).print(table if lines else "nothing differs")
    if refused:
        sys.exit("\n".join(["on a GPU these would fail:", *refused]))


if __name__ == "__main__":
    main()
