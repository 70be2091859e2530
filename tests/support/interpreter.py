"""Triton kernels on a CPU: a file's tests run in a child process, in which Triton interprets its kernels.

With PRIMALDUAL_HOPPER=1 they run in this process instead, as the kernels are compiled for Hopper (`support.hopper`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HOPPER = os.environ.get("PRIMALDUAL_HOPPER") == "1" and not _INTERPRETED
ON_CPU = _INTERPRETED or HOPPER
"""Whether this process runs the kernels, on tensors of the CPU: the child process, or all with PRIMALDUAL_HOPPER=1."""

on_cpu = pytest.mark.skipif(not ON_CPU, reason="runs in the child process, with TRITON_INTERPRET=1")


def child_process(file: str, deep: bool = False) -> Callable[[], None]:
    """The test that runs those of a file in the interpreter, where there is no GPU; `deep`: those with this mark."""

    @pytest.mark.skipif(ON_CPU, reason="the kernels are tested in this process")
    @pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are tested on the GPU itself")
    def test() -> None:
        those = "deep" if deep else "not deep"
        command = [sys.executable, "-m", "pytest", file, "-q", "-x", "-p", "no:cacheprovider", "-m", those]
        environment = os.environ | {"TRITON_INTERPRET": "1"}
        child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert child.returncode == 0, child.stdout + child.stderr

    return pytest.mark.deep(test) if deep else test
