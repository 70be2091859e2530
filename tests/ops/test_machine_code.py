"""What the compiler makes of the kernels on Hopper, without a GPU: loops that would wait for spills are seen."""

import json
import subprocess
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from support.interpreter import ON_CPU

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "machine_code.py"
pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(not SCRIPT.is_file(), reason="the benchmarks are not here"),
    pytest.mark.skipif(ON_CPU, reason="the interpreter compiles nothing"),
]
Rows = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    path = tmp_path_factory.mktemp("code") / "rows.json"
    child = subprocess.run([sys.executable, SCRIPT, "--json", path], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    return {(row["form"], row["kernel"]): row for row in json.loads(path.read_text())}


def in_loops(row: dict[str, Any]) -> int:
    return sum(loop["spills"] for loop in row["loops"])


def test_heads_of_64_stay_in_registers(rows: Rows) -> None:
    """But for one number, causal ones two, that is written and read again in a turn of several hundred instructions."""
    most = {key: 4 if "causal" in key[0] else 2 for key in rows if "× 64, bfloat16" in key[0]}
    spilt = {key: in_loops(rows[key]) for key in most if in_loops(rows[key]) > most[key]}
    assert not spilt


def test_means_over_windows_stay_in_registers(rows: Rows) -> None:
    """In float32, too, where a product is many multiplications: of 64 rows it kept 8 KB a thread in memory.

    And however long a window is: the matrix of who belongs to which once had as many rows.
    """
    means = {key: row for key, row in rows.items() if key[1] == "pool"}
    assert {"float32", "tf32", "windows of 512"} <= {word for form, _ in means for word in form.split(", ")}
    assert {key: row["spilled"] for key, row in means.items() if row["spilled"] > 8} == {}  # two registers


@pytest.mark.parametrize(
    ("form", "kernel", "programs"),
    [("sh, 512 × 64, bfloat16", "backward", 3), ("sh, 1024 × 64, bfloat16", "backward", 3),
     ("sh, 1024 × 64, bfloat16", "forward", 4), ("sh, 1000 × 64, bfloat16, causal", "forward", 4),
     ("sh, 1000 × 64, bfloat16, causal", "backward", 3), ("bn+sh, 1024 × 64, bfloat16", "forward", 4),
     *((f"{name}, 896 × {dim}, bfloat16, dropout", "forward", 5)
       for name in ("softmax", "sh", "bn+sh", "sparse") for dim in (8, 16))],
)  # fmt: skip
def test_as_many_programs_fit_as_were_measured(form: str, kernel: str, programs: int, rows: Rows) -> None:
    assert rows[form, kernel]["programs"] >= programs


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = spec_from_file_location("machine_code", SCRIPT)
    monkeypatch.setitem(sys.modules, "machine_code", module := module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


def test_a_loop_is_found_with_what_it_spills(script: Any) -> None:
    lines = ["MOV R1, R2", "LDL R3, [R1]", "FADD R3, R3, R4", "@P0 BRA 0x0010", "STL [R1], R3", "BRA 0x0050"]
    code = "\n".join(f"        /*{16 * n:04x}*/        {text} ;" for n, text in enumerate(lines))
    assert script.loops(script.instructions(code)) == [{"instructions": 3, "spills": 1}]


def test_what_differs_is_shown_with_what_is_new_and_gone(script: Any) -> None:
    def row(form: str, kernel: str, registers: int = 32, digest: str = "a") -> dict[str, Any]:
        return {"form": form, "kernel": kernel, "registers": registers, "spilled": 0, "shared": 0, "programs": 16,
                "code": 9, "digest": digest, "loops": []}  # fmt: skip

    before = [row("a", "pool"), row("a", "place"), row("a", "delta"), row("b", "pool")]
    now = [row("a", "pool", 40), row("a", "delta"), row("a", "delta 2"), row("c", "pool")]
    found = {tuple(line[:2]): line[2] for line in script.differences(before, now)}
    assert found == {("a", "pool"): "32 → 40", ("a", "place"): "32 → –", ("a", "delta 2"): "– → 32"}
    ((*_, code, _),) = script.differences([row("a", "pool")], [row("a", "pool", digest="b")])
    assert code == "9 a → 9 b"  # as many instructions, and others


@pytest.mark.parametrize(
    ("options", "said"),
    [(("--only", "nothing"), "no form's name holds 'nothing'"), (("--against", "nowhere"), "takes a file that --json")],
)
def test_what_cannot_be_is_said(options: tuple[str, ...], said: str) -> None:
    child = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, check=False)
    assert child.returncode == 2 and said in child.stderr and "Traceback" not in child.stderr
