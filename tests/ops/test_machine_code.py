"""What the compiler makes of the ragged kernels on Hopper, without a GPU: loops that would wait for spills are seen."""

import json
import subprocess
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from support.interpreter import INTERPRETED

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "machine_code.py"
pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(not SCRIPT.is_file(), reason="the benchmarks are not here"),
    pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing"),
]
Rows = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    path = tmp_path_factory.mktemp("code") / "rows.json"
    subprocess.run([sys.executable, SCRIPT, "--json", path], check=True, capture_output=True)
    return {(row["form"], row["kernel"]): row for row in json.loads(path.read_text())}


def in_loops(row: dict[str, Any]) -> int:
    return sum(loop["spills"] for loop in row["loops"])


def test_heads_of_64_stay_in_registers(rows: Rows) -> None:
    spilt = {key: in_loops(row) for key, row in rows.items() if "× 64, bfloat16" in key[0] and in_loops(row) > 2}
    assert not spilt


def test_means_over_windows_stay_in_registers(rows: Rows) -> None:
    """In float32, too, where a product is many multiplications: of 64 rows it kept 13 KB a thread in memory.

    And however long a window is: the matrix of who belongs to which once had as many rows.
    """
    means = {key: row for key, row in rows.items() if key[1] == "pool"}
    assert {"float32", "tf32", "windows of 512"} <= {word for form, _ in means for word in form.split(", ")}
    assert {key: row["spilled"] for key, row in means.items() if row["spilled"] > 8} == {}


@pytest.mark.parametrize(
    ("form", "kernel", "programs"),
    [("sh, 512 × 64, bfloat16", "backward", 3), ("sh, 1024 × 64, bfloat16", "backward", 3),
     ("sh, 1024 × 64, bfloat16", "forward", 4), ("bn+sh, 1024 × 64, bfloat16", "forward", 4),
     *((f"{name}, 896 × {dim}, bfloat16, dropout", "forward", 5)
       for name in ("softmax", "sh", "bn+sh", "sparse") for dim in (8, 16))],
)  # fmt: skip
def test_as_many_programs_fit_as_were_measured(form: str, kernel: str, programs: int, rows: Rows) -> None:
    assert rows[form, kernel]["programs"] >= programs


def test_a_loop_is_found_with_what_it_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["MOV R1, R2", "LDL R3, [R1]", "FADD R3, R3, R4", "@P0 BRA 0x0010", "STL [R1], R3", "BRA 0x0050"]
    code = "\n".join(f"        /*{16 * n:04x}*/        {text} ;" for n, text in enumerate(lines))
    spec = spec_from_file_location("machine_code", SCRIPT)
    monkeypatch.setitem(sys.modules, "machine_code", script := module_from_spec(spec))
    spec.loader.exec_module(script)
    assert script.loops(code) == [{"instructions": 3, "spills": 1}]
