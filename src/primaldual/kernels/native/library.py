"""The compiled part: attention, and layers up to its outputs, as an autograd node in C++ that replays Python's steps.

In eager mode at short lengths the time is the host's, most of it Python's: an empty autograd function alone takes
longer than the kernels. `primaldual build` compiles `native.cpp` once, and the library uses it from then on. Without it
everything works, with more work for the host.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch

from ...base.cache import cache_directory
from ..launching import interpreted

logger = logging.getLogger(__name__)

NAME = "primaldual_native"
SOURCE = Path(__file__).with_name("native.cpp")


class BuildError(RuntimeError):
    """The compiled part cannot be built; the message says what is missing."""


def place() -> Path:
    """Where the compiled part is kept: a file for every version of torch, Python and the source."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    folder = f"torch-{torch.__version__}-{sys.implementation.cache_tag}-{digest}"
    return cache_directory() / "native" / folder / f"{NAME}.so"


@functools.cache
def library() -> ModuleType | None:
    """The compiled part, where it was built and `PRIMALDUAL_NATIVE` is not 0; looked for once.

    Not where Triton's interpreter runs the kernels: it compiles nothing that could be launched.
    """
    if os.environ.get("PRIMALDUAL_NATIVE") == "0" or interpreted() or not sys.platform.startswith("linux"):
        return None
    try:
        path = place()
        if not path.is_file():
            return None
    except (OSError, RuntimeError):  # there is no home
        return None
    try:
        found = load(path)
        reason = found.missing()
    except (OSError, ImportError) as error:
        found, reason = None, str(error)
    if reason:
        logger.warning("%s is not used: %s; `primaldual build --rebuild` makes it anew", path, reason)
    return None if reason else found


def load(path: Path) -> ModuleType:
    """The module in a file that was built."""
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def refusal() -> str | None:
    """Why it cannot be built here; None when it can."""
    if not sys.platform.startswith("linux"):
        return f"the kernels run on Linux, not on {sys.platform}"
    if _includes() is None:
        return "Triton is not installed, which has the kernels' compiler and CUDA's header"
    missing = [name for name in (os.environ.get("CXX", "c++"), "ninja") if shutil.which(name) is None]
    return f"{' and '.join(missing)} not found; install a C++ compiler and ninja" if missing else None


def build(path: Path | None = None) -> Path:
    """Compile, about half a minute; all or nothing. Where the file is."""
    if reason := refusal():
        raise BuildError(reason)
    from torch.utils import cpp_extension

    path = path or place()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        try:
            cpp_extension.load(
                NAME, [str(SOURCE)], extra_cflags=["-O2"], extra_include_paths=[str(_includes())],
                build_directory=scratch, with_cuda=False, is_python_module=False,
            )  # fmt: skip
        except (RuntimeError, OSError) as error:
            raise BuildError(f"the compiler failed:\n{error}") from error
        (Path(scratch) / f"{NAME}.so").replace(path)
    library.cache_clear()
    return path


def _includes() -> Path | None:
    """The folder of cuda.h that comes with Triton."""
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent / "backends" / "nvidia" / "include"
    return folder if (folder / "cuda.h").is_file() else None
