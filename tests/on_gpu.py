"""Runs every test with the mark `gpu`, side by side, each file in a process of its own, and says how each file went.

An illegal access to memory fails every later test of its process: here these are of the same file, and no others.
`python tests/on_gpu.py [pytest's arguments]`, with this library on the path.
"""

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.util import find_spec
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
PYTEST = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:benchmark", "-p", "no:cacheprovider"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
TESTS_PER_WORKER = 40
"""A file with more is shared by several workers, so that the longest file does not decide the time."""


def pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    together = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run([*PYTEST, *arguments], cwd=ROOT, env=ENVIRONMENT, check=False, **together)


def run(file: str, tests: int, arguments: list[str]) -> tuple[str, int, float, str]:
    """The file, pytest's exit status, seconds, and what was printed."""
    start, workers = time.monotonic(), 1 + tests // TESTS_PER_WORKER
    side_by_side = ["-n", str(workers), "--dist", "worksteal"] if workers > 1 and find_spec("xdist") else []
    ended = pytest(file, *side_by_side, *arguments)
    return file, ended.returncode, time.monotonic() - start, ended.stdout


def main(arguments: list[str]) -> int:
    if not torch.cuda.is_available():
        print("these tests need a CUDA device, and torch finds none")
        return 1
    found = pytest("--collect-only", "-qq", "tests", *arguments)
    counts = {file: int(count) for file, count in re.findall(r"^(tests/\S+\.py): (\d+)$", found.stdout, re.MULTILINE)}
    if found.returncode or not counts:
        print(found.stdout)
    outcomes = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        largest_first = sorted(counts.items(), key=lambda item: -item[1])
        for done in as_completed([pool.submit(run, *item, arguments) for item in largest_first]):
            outcomes.append(outcome := done.result())
            file, status, seconds, printed = outcome
            print(f"{'ok    ' if status == 0 else 'FAILED'} {file}, {seconds:.0f} s", flush=True)
            if status:
                print(printed, flush=True)
    print(f"\n{'status':>6} {'seconds':>7}  file")
    for file, status, seconds, printed in sorted(outcomes):
        print(f"{status:>6} {seconds:>7.0f}  {file}: {(printed.strip().splitlines() or ['no output'])[-1]}")
    failed = sum(status != 0 for _, status, _, _ in outcomes)
    print(f"{len(outcomes)} files, {failed} with failures" + ", and the collection failed" * bool(found.returncode))
    return 1 if failed or found.returncode or not counts else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
