"""What is printed can be read: in any encoding, at any width, off a terminal, and when it is stopped."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from primaldual.base.terminal import side_by_side
from primaldual.cli import app

SOURCE = Path(__file__).parents[2] / "src"


def environment(**changes: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(SOURCE)} | changes


@pytest.mark.parametrize("charset", ["ascii", "latin-1"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("mechanisms",), ("explain", "bn"), ("data", "list"), ("--help",), ("certify", "bn"), ("explain", "no β"),
        ("reproduce", "table-uea", "--only", "JapaneseVowels", "--mechanisms", "softmax,bn", "--seeds", "1", "--epochs",
         "1", "--device", "cpu"),
        ("train", "JapaneseVowels", "--epochs", "1", "--device", "cpu"),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)  # fmt: skip
@pytest.mark.usefixtures("cache", "short_series")
def test_what_an_encoding_cannot_say_is_replaced(tmp_path, monkeypatch, charset, arguments):
    monkeypatch.setattr("primaldual.data.load", sys.modules["primaldual.paper.families"].load)
    place = ("--output", str(tmp_path)) if arguments[0] in ("train", "reproduce") else ()
    result = CliRunner(charset=charset).invoke(app, [*arguments, *place])
    assert not isinstance(result.exception, UnicodeError)
    assert result.exit_code == (2 if "no β" in arguments else 0), result.output


def test_a_command_of_its_own_process_writes_ascii():
    done = subprocess.run(
        [sys.executable, "-m", "primaldual", "mechanisms"], capture_output=True, check=False,
        env=environment(PYTHONIOENCODING="ascii"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert b"bn+sh" in done.stdout and done.stdout.isascii()


@pytest.mark.parametrize("script", [False, True], ids=["python -m", "the script"])
def test_stopped_while_torch_is_imported_a_command_says_one_word(tmp_path, script):
    (tmp_path / "primaldual").write_text("from primaldual.cli import app\napp()\n")
    start = [str(tmp_path / "primaldual")] if script else ["-m", "primaldual"]
    process = subprocess.Popen([sys.executable, *start, "mechanisms"], stderr=subprocess.PIPE, env=environment())
    time.sleep(0.7)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert (process.returncode, said) in ((130, b"stopped\n"), (-signal.SIGINT, b""))


@pytest.mark.usefixtures("cache", "short_series")
def test_at_80_columns_a_table_stands_in_parts_and_nothing_is_cut(tmp_path):
    names = ("softmax", "bn", "sh", "bn+sh", "qk-norm", "linear", "linear-bn", "linear-sh", "linear-bn+sh")
    result = CliRunner(env={"COLUMNS": "80"}).invoke(
        app,
        ["reproduce", "table-uea", "--only", "JapaneseVowels", "--mechanisms", ",".join(names), "--seeds", "1",
         "--epochs", "1", "--device", "cpu", "--output", str(tmp_path)],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    tables = result.stdout[result.stdout.index("to go\n") :].partition("note:")[0]
    assert "…" not in tables and all(len(line) <= 80 for line in tables.splitlines())
    for name in names:
        assert re.search(rf"(?<!\S){re.escape(name)}(?!\S)", tables)
    log = result.stderr.splitlines()
    assert len(log) == len(names) and "JapaneseVowels, linear-bn+sh: epoch 1 of 1, loss" in log[-1]


def test_columns_are_in_some_part_once_and_labels_in_each():
    columns = [["a" * 5], ["b"] * 3, *[["x" * n] for n in (3, 30, 4, 100, 2)]]
    parts = list(side_by_side(columns, labels=2, width=40))
    assert all(part[:2] == [0, 1] for part in parts)
    assert [i for part in parts for i in part[2:]] == [2, 3, 4, 5, 6]
