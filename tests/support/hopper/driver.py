"""Triton's kernels, compiled for Hopper, run by `machine` in place of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from primaldual.kernels import launching
from primaldual.kernels.kept import Kept
from primaldual.kernels.ragged import launch as ragged_launch

from .machine import Program
from .order import Trace

SHARED = 232448
"""Bytes that a program can have at most."""


class Driver:
    """One for a device that is not there."""

    def __init__(self, edit: Callable[[str], str]) -> None:
        self.edit = edit
        self.utils = SimpleNamespace(load_binary=self.load, get_device_properties=lambda _: {"max_shared_mem": SHARED})
        self.launched: list[str] = []
        self.open: list[Trace] = []
        self.text = ""

    def remember(self, module: Any, function: Any, called: str, files: dict[str, str], digest: str) -> None:
        """What is about to be loaded: Triton hands over machine code alone."""
        self.text = next(Path(file).read_text() for called, file in files.items() if called.endswith(".ptx"))

    def load(self, called: str, code: bytes, shared: int, device: int) -> tuple[object, Program, int, int, int]:
        return None, Program(self.edit(self.text), shared), 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        kinds = tuple(source.signature.values())

        def launch(x: int, y: int, z: int, stream: int, program: Program, *rest: Any) -> None:
            self.launched.append(program.kernel.name)
            before = self.open if getattr(metadata, "launch_pdl", False) else []
            self.open = program.run((x, y, z), list(_given(rest[4:], kinds)), before)

        return launch

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def _given(values: tuple[Any, ...], kinds: tuple[Any, ...]) -> Iterator[Any]:
    """Arguments that the compiler has left; those of tuples one by one."""
    for value, kind in zip(values, kinds, strict=True):
        if isinstance(kind, tuple):
            yield from _given(value, kind)
        elif kind != "constexpr":
            yield value


@contextmanager
def hopper(tf32: bool = False, edit: Callable[[str], str] = str) -> Iterator[Driver]:
    """Inside, tensors on the CPU are taken by kernels as they are compiled for Hopper; or as they are after an edit."""
    there, before = Driver(edit), driver._active
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launching, "_ready", Kept(1024))
        patch.setattr(launching, "starts_early", lambda device: True)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(launching, "on_cpu", lambda: True)
        if tf32:
            patch.setattr(ragged_launch, "precision", lambda q: "tf32")
        driver.set_active(there)
        knobs.runtime.kernel_load_start_hook.add(there.remember)
        try:
            yield there
        finally:
            knobs.runtime.kernel_load_start_hook.remove(there.remember)
            driver.set_active(before)
