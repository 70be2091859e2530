"""What the compiler makes of the ragged kernels on Hopper: registers, spills, loops. No GPU is needed.

    python benchmarks/machine_code.py                      # a table, about two minutes
    python benchmarks/machine_code.py --only bn+sh         # the forms whose names hold this
    python benchmarks/machine_code.py --json now.json      # to compare with later
    PYTHONPATH=other/src python benchmarks/machine_code.py --against now.json

The Python path of every form is walked with its launches noted down, which compiles the kernels and does not launch
them; the disassembler that comes with Triton reads what came out. `spilled`: bytes a thread keeps in memory, and after
the plus how many instructions of its loops go there. `programs`: as many as fit on a multiprocessor. `loops`:
instructions of the longest ones.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from primaldual import Primal, mechanism
from primaldual.ops import ragged
from primaldual.ops.gpu import launching, ragged_launch
from primaldual.ops.gpu.noting import Launch, noted
from primaldual.ops.problem import state

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


FORMS = (
    *(Form("sh", length) for length in (16, 128, 512, 1024)),
    *(Form("sh", 1024, dim) for dim in (16, 32, 128)),
    *(Form("sh", 896, dim, dtype) for dtype in ("float32", "tf32") for dim in (16, 64, 128)),
    *(Form("bn+sh", length, dim) for length in (128, 1024) for dim in (16, 64)),
    *(Form(name, 896, dim, dropout=0.1) for name in ("softmax", "sh", "bn+sh", "sparse") for dim in (8, 16)),
    *(Form("bn+sh", 896, dim, dropout=0.1, padded=True) for dim in (8, 64)),
    *(Form("sh", 1024, 64, dtype, window=512) for dtype in ("bfloat16", "float32")),
    Form("softmax", 1000, causal=True), Form("sh", 1000, causal=True), Form("softmax", 1024),
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


def launches(form: Form) -> list[Launch]:
    """Those of both passes."""
    single = form.dtype in ("float32", "tf32")
    dtype = torch.float32 if single else getattr(torch, form.dtype)
    q, k, v = (torch.randn(8, 8, form.length, form.dim).to(dtype).requires_grad_() for _ in range(3))
    padding = torch.arange(form.length).expand(8, -1) >= form.length - 1 if form.padded else None
    problem = state(
        q, k, v, form.primal, is_causal=form.causal, dropout_p=form.dropout, key_padding_mask=padding,
        query_padding_mask=None, attn_mask=None, parameters=None, need_weights=False,
    )  # fmt: skip
    with ExitStack() as stack:
        for where, name, instead in (
            (launching, "_ready", {}),
            (launching, "starts_early", lambda device: True),
            (torch.cuda, "current_device", lambda: 0),
            (ragged_launch, "precision", lambda q: "tf32" if form.dtype == "tf32" else "ieee"),
        ):
            stack.enter_context(patch.object(where, name, instead))
        steps = stack.enter_context(noted())
        out, _ = ragged.run(problem)
        torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
        return [step for step in steps if isinstance(step, Launch)]


def examine(form: Form) -> Iterator[dict[str, Any]]:
    for step in launches(form):
        compiled = step.ready.compiled
        code, usage = (disassembled(compiled.asm["cubin"], how) for how in ("-sass", "-res-usage"))
        registers, spilled = (int(re.search(rf"{what}:(\d+)", usage)[1]) for what in ("REG", "STACK"))  # type: ignore[index]
        threads, shared = 32 * compiled.metadata.num_warps, compiled.metadata.shared
        fit = REGISTERS // (-(-registers // 8) * 8 * threads), SHARED // (shared + 1024), THREADS // threads
        yield {
            "form": form.name, "kernel": step.name, "registers": registers, "spilled": spilled, "shared": shared,
            "programs": min(fit), "grid": list(step.ready.grid), "loops": loops(code),
        }  # fmt: skip


def disassembled(cubin: bytes, how: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, how, file.name], capture_output=True, text=True, check=True).stdout


def loops(code: str) -> list[dict[str, int]]:
    """Whatever lies between a branch back and where it goes, longest first: instructions, and those that spill."""
    lines = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]*);", code)]
    number = {at: n for n, (at, _) in enumerate(lines)}
    found = []
    for n, (at, text) in enumerate(lines):
        branch = re.search(r"\bBRA\S*\s.*?0x([0-9a-f]+)", text)
        if branch and (to := int(branch[1], 16)) < at and to in number:
            body = [text for _, text in lines[number[to] : n + 1]]
            spills = sum(bool(re.search(r"\b(LDL|STL)\b", text)) for text in body)
            found.append({"instructions": len(body), "spills": spills})
    return sorted(found, key=lambda loop: -loop["instructions"])


def cells(row: dict[str, Any]) -> list[str]:
    inside = sum(loop["spills"] for loop in row["loops"])
    return [
        str(row["registers"]), f"{row['spilled']} + {inside}" if inside else str(row["spilled"]), str(row["shared"]),
        str(row["programs"]), " ".join(str(loop["instructions"]) for loop in row["loops"][:4]),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="forms whose names hold this")
    parser.add_argument("--json", type=Path, help="write what was found")
    parser.add_argument("--against", type=Path, help="what was written before: only what differs is shown")
    asked = parser.parse_args()
    if launching.interpreted():
        parser.error("TRITON_INTERPRET is set: then Triton compiles nothing")
    before = {(r["form"], r["kernel"]): r for r in json.loads(asked.against.read_text())} if asked.against else {}
    driver.set_active(Hopper())
    rows = []
    table = Table("form", "kernel", "registers", "spilled", "shared", "programs", "loops")
    for form in FORMS:
        if asked.only not in form.name:
            continue
        for row in examine(form):
            rows.append(row)
            old = before.get((row["form"], row["kernel"]))
            if not asked.against:
                table.add_row(row["form"], row["kernel"], *cells(row))
            elif old is not None and (was := cells(old)) != (now := cells(row)):
                changed = (a if a == b else f"{a} → {b}" for a, b in zip(was, now, strict=True))
                table.add_row(row["form"], row["kernel"], *changed)
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1) + "\n")
    Console(width=None if Console().is_terminal else 160).print(table if table.row_count else "nothing differs")


if __name__ == "__main__":
    main()
