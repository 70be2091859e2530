"""The command line says what the library does, and fails in one line."""

import re
import sys

import pytest
from typer.testing import CliRunner, Result

import primaldual
from primaldual.cli import app
from primaldual.cli.mechanism_options import OPTIONS


def call(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, arguments)


def one_line(result: Result) -> str:
    (line,) = result.stderr.strip().splitlines()
    return line


def test_mechanisms_lists_every_name_with_what_it_is():
    result = call("mechanisms")
    assert result.exit_code == 0
    listed = {line.split()[0] for line in result.stdout.splitlines() if line.strip()}
    assert listed >= set(primaldual.mechanisms())
    assert "Linear Attention-BN+SH" in result.stdout


FORMS = [(name, "text") for name in primaldual.mechanisms()] + [("bn+sh", "latex"), ("linear", "markdown")]


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_explain_prints_the_derivation(name, form):
    result = call("explain", name, *([] if form == "text" else [f"--{form}"]))
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == primaldual.derive(name).explain(form).strip()


def test_options_reach_the_mechanism():
    scaled = call("explain", "bn+sh", "--beta", "0.3", "--scales", "1,1,2,4")
    assert scaled.stdout.strip() == (
        primaldual.derive(primaldual.mechanism("bn+sh", beta=0.3, scales=(1, 1, 2, 4))).explain().strip()
    )
    convolved = call("explain", "conv2d", "--size", "3x3", "--grid", "14x14")
    assert convolved.stdout.strip() == (
        primaldual.derive(primaldual.mechanism("conv2d", size=(3, 3), grid=(14, 14))).explain().strip()
    )
    for given, options in (
        (("qk-norm", "--temperature", "--rotary"), {"temperature": True, "rotary": True}),
        (("conv1d", "--channels", "each"), {"channels": "each"}),
        (("alibi", "--slopes", "0.5,0.25"), {"slopes": (0.5, 0.25)}),
    ):
        expected = primaldual.derive(primaldual.mechanism(given[0], **options)).explain()
        assert call("explain", *given).stdout.strip() == expected.strip()
    assert call("explain", "sparse", "--pattern", "window:16").stdout != call("explain", "sparse").stdout
    assert call("explain", "bn", "--full").stdout != call("explain", "bn").stdout


def test_an_unknown_mechanism_gets_the_nearest_names():
    result = call("explain", "softmx")
    assert result.exit_code == 2
    line = one_line(result)
    assert "softmx" in line and "did you mean 'softmax'" in line
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("sh", "--beta", "0.5"), "no option 'beta'"),
        (("sh", "--scales", "1,two"), "--scales takes integers"),
        (("conv2d", "--grid", "14"), "rows x columns"),
        (("sparse", "--pattern", "spiral"), "strided, fixed, window"),
        (("sparse", "--pattern", "spiral:3"), "strided, fixed, window"),
        (("bn", "--beta", "nan"), "finite"),
        (("bn", "--latex", "--markdown"), "one of --latex and --markdown"),
    ],
)
def test_bad_options_fail_in_one_line(arguments, said):
    result = call("explain", *arguments)
    assert result.exit_code == 2
    assert said in one_line(result)


def test_version():
    assert call("--version").stdout.strip() == f"primaldual {primaldual.__version__}"


def test_help_shows_examples():
    plain = re.sub(r"\x1b\[[0-9;]*m", "", call("--help").stdout)
    assert "primaldual explain bn+sh" in plain
    listed = re.findall(r"^│ ([a-z]+)  ", plain, re.MULTILINE)
    assert listed == [
        "mechanisms", "explain", "demo", "certify", "train", "generate", "predict", "reproduce", "sweep", "efficiency",
        "build", "bench", "data",
    ]  # fmt: skip


@pytest.mark.parametrize("command", ["explain", "train"])
def test_both_commands_that_take_a_mechanism_take_all_its_options(command):
    plain = re.sub(r"\x1b\[[0-9;]*m", "", call(command, "--help").stdout)
    assert not [name for name in OPTIONS if f"--{name} " not in plain]


@pytest.mark.parametrize("package", ["aeon", "matplotlib"])
def test_a_missing_extra_is_named(monkeypatch, tmp_path, package):
    monkeypatch.setenv("PRIMALDUAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, package, None)
    result = call("demo", "--output", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert package in (line := one_line(result)) and 'pip install "primaldual[demo]"' in line
    assert not (tmp_path / "out").exists()


def test_demo_leaves_the_files_of_others_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    result = call("demo", "--output", str(tmp_path))
    assert result.exit_code == 2
    line = one_line(result)
    assert "thesis.tex" in line and "--output" in line and "--force" in line
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
