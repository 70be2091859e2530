"""The ragged kernels under NVIDIA's compute-sanitizer: every form of the backward pass, short lengths, all widths.

    python benchmarks/sanitize.py                                      # memcheck, some minutes of a GPU and 16 cores
    python benchmarks/sanitize.py --tool racecheck --lengths 17 33     # races in shared memory; slow
    python benchmarks/sanitize.py --only "bfloat16, 128" --lengths 17  # the processes whose names hold this

Every form has a process of its own, for every dtype and head dimension: pooled, re-centred, causal, padded, biased,
sparse, with dropout, in an order that is the same every time, and with whole heads in one sweep; with as many keys as
queries, and with 200. What the sanitizer prints is read to its end; a process that reports an error, or that ends
before it has gone through everything, is shown with the beginning of its report, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import product

import torch

from primaldual import attention, mechanism
from primaldual.primal import Primal, Strided, Window

HEAD_DIMS, DTYPES, MANY_KEYS = (128, 64, 32, 16, 8), ("bfloat16", "float32"), 200
SCALES = (1, 2, 3, 4)
DONE = "went through everything"


def forms() -> Iterator[tuple[str, Primal, dict[str, object]]]:
    """Every way through the backward kernels: a name, the primal, and what else `attention` is given."""
    scaled = mechanism("sh", scales=SCALES)
    yield "sh", scaled, {}
    yield "bn+sh, dropout", mechanism("bn+sh", learnable=True, scales=SCALES), {"dropout_p": 0.2}
    yield "softmax, causal", mechanism("softmax"), {"is_causal": True}
    yield "sh, causal, dropout", scaled, {"is_causal": True, "dropout_p": 0.2}
    yield "bn+sh, padded", mechanism("bn+sh", scales=SCALES), {"padded": True}
    yield "softmax, biased", mechanism("softmax"), {"biased": True}
    strided = mechanism("sparse-sh", pattern=Strided(5), scales=SCALES)
    yield "strided, dropout", strided, {"dropout_p": 0.2}
    yield "window", mechanism("sparse", pattern=Window(3)), {}
    yield "sh, in order", scaled, {"ordered": True}
    yield "softmax, swept", mechanism("softmax"), {"ordered": True, "batch": 132, "dropout_p": 0.2}


def both_passes(
    primal: Primal, length: int, keys: int, dim: int, dtype: torch.dtype, *, batch: int = 2, padded: bool = False,
    biased: bool = False, ordered: bool = False, **options: object,
) -> None:  # fmt: skip
    heads = len(SCALES)
    q = torch.randn(batch, heads, length, dim, device="cuda", dtype=dtype, requires_grad=True)
    k, v = (torch.randn(batch, heads, keys, dim, device="cuda", dtype=dtype, requires_grad=True) for _ in range(2))
    mask = None
    if padded:
        mask = torch.arange(keys, device="cuda").expand(batch, -1) >= max(1, keys - 3)
    if biased:
        mask = torch.randn(batch, keys, device="cuda", dtype=dtype)
    torch.use_deterministic_algorithms(ordered)
    try:
        out = attention(q, k, v, primal, key_padding_mask=mask, impl="ragged", **options)  # type: ignore[arg-type]
        torch.autograd.grad(out, (q, k, v), torch.randn_like(q))
    finally:
        torch.use_deterministic_algorithms(False)


def go_through(dtype: str, dim: int, form: str, lengths: list[int]) -> None:
    """Everything that one process does."""
    primal, options = next((primal, options) for name, primal, options in forms() if name == form)
    for length, keys in [(each, many) for each in lengths for many in (each, MANY_KEYS)]:
        print(f"{length} queries, {keys} keys", flush=True)
        both_passes(primal, length, keys, dim, getattr(torch, dtype), **options)  # type: ignore[arg-type]
        torch.cuda.synchronize()
    print(DONE)


def sanitized(tool: str, dtype: str, dim: int, form: str, lengths: list[int]) -> tuple[str, str]:
    """A name, and where not all was well the last step and the first lines of the report."""
    command = [
        "compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, __file__,
        "--process", dtype, str(dim), form, "--lengths", *map(str, lengths),
    ]  # fmt: skip
    began = time.monotonic()
    environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # what an order of sums that is the same needs
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    lines = (ended.stdout + ended.stderr).splitlines()
    nothing = "SUMMARY: 0 hazards" if tool == "racecheck" else "ERROR SUMMARY: 0 errors"
    name = f"{dtype}, {dim}, {form}, {time.monotonic() - began:.0f} s"
    if ended.returncode == 0 and DONE in lines and any(nothing in line for line in lines):
        return name, ""
    steps = [line for line in lines if " queries, " in line]
    report = [line for line in lines if line.startswith("=========")] or lines[-20:]
    return name, "\n".join([f"  last step: {steps[-1] if steps else 'none'}", *("  " + line for line in report[:25])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", default="memcheck", choices=["memcheck", "racecheck", "initcheck", "synccheck"])
    parser.add_argument("--lengths", type=int, nargs="+", default=list(range(1, 81)), help="of the queries; 1 to 80")
    parser.add_argument("--only", default="", help="processes whose names hold this, such as 'bfloat16, 128'")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes side by side")
    parser.add_argument("--process", nargs=3, metavar=("DTYPE", "DIM", "FORM"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed")
    if asked.process:
        dtype, dim, form = asked.process
        return go_through(dtype, int(dim), form, asked.lengths)
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not on the path; it comes with NVIDIA's CUDA toolkit")
    every = product(DTYPES, HEAD_DIMS, [name for name, _, _ in forms()])
    chosen = [one for one in every if asked.only in f"{one[0]}, {one[1]}, {one[2]}"]
    if not chosen:
        parser.error(f"no process is named like {asked.only!r}; such as 'bfloat16, 128, sh'")
    wrong = 0
    with ThreadPoolExecutor(asked.jobs) as pool:
        for done in as_completed([pool.submit(sanitized, asked.tool, *one, asked.lengths) for one in chosen]):
            name, report = done.result()
            print(f"{'ERRORS' if report else 'no errors'}: {name}", *([report] if report else []), sep="\n", flush=True)
            wrong += report != ""
    print(f"{len(chosen) - wrong} of {len(chosen)} processes without errors ({asked.tool})")
    return sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
