"""`primaldual efficiency` prints tables, writes a record and pictures, and fails in one line."""

import json

import pytest
from typer.testing import CliRunner, Result

from primaldual.bench.efficiency import measure
from primaldual.cli import app


def call(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, ["efficiency", *arguments])


def test_the_papers_point_is_counted_without_a_device(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = call("--counted", "--dimensions", "64", "--lengths", "4096")
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "results" / "counted" / "efficiency.json").read_text())
    assert content["complete"] is True
    assert content["environment"]["command"] == "primaldual efficiency --dimensions 64 --lengths 4096 --counted"
    pictures = sorted(file.name for file in (tmp_path / "results" / "counted").glob("*.png"))
    assert pictures == [f"efficiency-{name}.png" for name in ("bn+sh", "sh", "sparse-bn+sh", "sparse-sh")]
    assert "−32.2" in result.stdout and "−31.9" in result.stdout
    tables = result.stdout.partition("materialised, where")[0]
    assert max(map(len, tables.splitlines())) <= 80


def test_quick_is_measured_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setitem(measure.TOKENS, "cpu", 1)
    path = tmp_path / "some.json"
    result = call(
        "--quick", "--device", "cpu", "--dimensions", "8", "--lengths", "16", "--output", str(path), "--no-plot"
    )
    assert result.exit_code == 0, result.output
    content = json.loads(path.read_text())
    assert {r["subject"] for r in content["records"]} == {"cost", "speed"}
    assert "note:" not in result.stdout and [file.name for file in tmp_path.iterdir()] == ["some.json"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--dimensions", "wide"), "--dimensions takes positive integers"),
        (("--dimensions", "63"), "dimensions must be even, for two heads; got 63"),
        (("--lengths", "0"), "--lengths takes positive integers"),
        (("--timed", "7"), "dimensions must be even"),
        (("--device", "tpu"), "--device takes cpu, cuda or cuda:N"),
    ],
)
def test_bad_options_fail_in_one_line(arguments, said):
    result = call(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr and len(result.stderr.strip().splitlines()) == 1
