"""The house stands: imports go down the floors that CONTRIBUTING lists, and the library needs little to be imported."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from primaldual.ops import EXECUTORS
from primaldual.ops.layer import ROUTES

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "primaldual"
ROOF = "primaldual"
"""The package itself, which gives the library's names and stands on everything that it imports."""


def floors() -> list[str]:
    """The packages as CONTRIBUTING lists them, the highest first."""
    rows = re.findall(r"^\| (`\w+/`.*?) \|", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`(\w+)/`", row)]


def files() -> list[Path]:
    """Every module in a package of the library."""
    return [path for path in SOURCE.rglob("*.py") if path.parent != SOURCE]


def modules(path: Path, source: str) -> Iterator[tuple[list[str], int]]:
    """The parts of every name that is imported, also inside functions, with its line."""
    package = ("primaldual", *path.relative_to(SOURCE).parts[:-1])
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = list(package[: len(package) - node.level + 1]) if node.level else []
            module = [*above, *(node.module or "").split(".")] if node.module else above
            found = [[*module, alias.name] for alias in node.names]
        else:
            continue
        yield from ((parts, node.lineno) for parts in found)


def imports(path: Path, source: str) -> Iterator[tuple[str, int]]:
    """The top package of every import of the library."""
    for parts, line in modules(path, source):
        if parts[0] == "primaldual":
            yield (parts[1] if len(parts) > 1 and (SOURCE / parts[1]).is_dir() else ROOF), line


def climbs(path: Path, source: str, order: list[str]) -> list[str]:
    """The imports of a file that do not go down."""
    package = path.relative_to(SOURCE).parts[0]
    allowed = {package, *order[order.index(package) + 1 :]}
    where = path.relative_to(SOURCE)
    return [f"{where}:{line} imports {name}" for name, line in imports(path, source) if name not in allowed]


def test_every_package_is_a_floor_that_contributing_lists_once():
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert sorted(floors()) == sorted(packages)


def test_imports_go_down_and_never_up():
    order = floors()
    assert not [one for path in files() for one in climbs(path, path.read_text("utf-8"), order)]


def test_an_import_inside_a_function_is_seen_however_it_is_written():
    path, order = SOURCE / "kernels" / "ragged" / "x.py", ["nn", "kernels", "base"]
    for line in ("from ...nn import y", "from ... import nn", "from primaldual.nn.z import y", "import primaldual.nn"):
        assert climbs(path, f"def f():\n    {line}", order) == ["kernels/ragged/x.py:2 imports nn"]
    assert climbs(path, "from ... import __version__", order) == ["kernels/ragged/x.py:1 imports primaldual"]
    assert not climbs(path, "from ...base import files\nfrom .. import plan\nimport torch", order)


def test_kernels_are_launched_in_the_machine_room_alone():
    names = {path: [".".join(parts) for parts, _ in modules(path, path.read_text("utf-8"))] for path in files()}
    kernels = SOURCE / "kernels"
    device_code = [
        ".".join(("primaldual", *path.relative_to(SOURCE).with_suffix("").parts))
        for path, found in names.items()
        if kernels in path.parents and "triton" in found
    ]
    assert "primaldual.kernels.encoder.update_kernel" in device_code
    for path, found in names.items():
        if kernels not in path.parents:
            assert not [
                name for name in found if f"{name}.".startswith(("triton.", *(f"{d}." for d in device_code)))
            ], path


def bare_launches(path: Path, source: str) -> list[str]:
    """Calls of the form kernel[grid](...) or kernel.warmup(...), which only `launching` makes."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [
        f"{path.relative_to(SOURCE)}:{call.lineno}"
        for call in calls
        if isinstance(call.func, ast.Subscript) or (isinstance(call.func, ast.Attribute) and call.func.attr == "warmup")
    ]


def test_every_launch_in_the_machine_room_goes_through_one_place():
    place = SOURCE / "kernels" / "launching.py"
    for path in (SOURCE / "kernels").rglob("*.py"):
        found = bare_launches(path, path.read_text("utf-8"))
        assert bool(found) if path == place else not found, found
    source = "def f(x):\n    kernels.add[work.grid](x)\n    add[(\n        1,\n    )](x)\n    launch(add, x[0])"
    assert bare_launches(place, source) == ["kernels/launching.py:2", "kernels/launching.py:3"]


def test_flex_attention_is_called_in_its_room_alone():
    callers = {
        path.parent.relative_to(SOURCE).as_posix()
        for path in files()
        for parts, _ in modules(path, path.read_text("utf-8"))
        if "flex_attention" in parts
    }
    assert callers == {"kernels/flex"}


@pytest.mark.parametrize("among", [EXECUTORS, ROUTES], ids=["executors", "routes of a layer"])
def test_what_a_plan_chooses_among_does_not_import_one_another(among):
    paths = {module.__name__: Path(str(module.__file__)) for module in among.values()}
    for name, path in paths.items():
        found = {".".join((*parts, "")) for parts, _ in modules(path, path.read_text("utf-8"))}
        assert not [other for other in paths if any(one.startswith(f"{other}.") for one in found)], name


def test_every_package_says_in_its_docstring_what_lives_there():
    for package in [SOURCE, *(SOURCE / name for name in floors())]:
        assert ast.get_docstring(ast.parse((package / "__init__.py").read_text("utf-8"))), package.name


def test_importing_the_library_brings_torch_and_numpy_and_not_the_solver():
    code = """if True:
        import sys
        import primaldual
        assert not [m for m in sys.modules if m.startswith(("primaldual.svr", "primaldual.regression"))]
        import primaldual.primal, primaldual.dual, primaldual.ops, primaldual.nn, primaldual.regression
        extras = {"aeon", "matplotlib", "optuna", "pandas", "PIL", "rich", "safetensors", "sklearn", "typer"}
        extras |= {"transformers"}
        assert not extras & set(sys.modules), extras & set(sys.modules)
        from primaldual.nn import SolvedAttention
        from primaldual.regression import diagnose, fit, recover
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
