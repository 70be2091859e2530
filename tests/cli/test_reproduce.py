"""`primaldual reproduce`, on the two sets inside the aeon package."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner, Result

from primaldual.cli import app
from primaldual.data import load
from primaldual.paper import ENGINES, compare
from primaldual.training import Ensemble, Record, Store
from training.toy import toy

pytestmark = pytest.mark.usefixtures("cache")


def call(*arguments: object) -> Result:
    options = ["--device", "cpu", "--offline"]
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["reproduce", *map(str, arguments), *options])


def test_a_part_of_a_table_is_trained_reported_and_never_trained_again(tmp_path, monkeypatch, short_series):
    part = ("table-uea", "--only", "JapaneseVowels,PEMS-SF", "--mechanisms", "softmax,bn+sh", "--seeds", 2,
            "--epochs", 2, "--output", tmp_path)  # fmt: skip
    first = call(*part)
    assert first.exit_code == 0, first.output
    assert "0 of 4 runs are recorded, 4 to go" in first.stdout
    for text in ("NOT the paper's recipe: epochs 2 instead of 400", "missing set PEMS-SF: there is no data set",
                 "99.46 ± 0.27", "against softmax"):  # fmt: skip
        assert text in first.stdout
    records = Store(tmp_path).records()
    assert sorted(record.seed for record in records) == [0, 0, 1, 1]
    assert {record.recipe["epochs"] for record in records} == {2}

    found = compare("table-uea", records, ["JapaneseVowels"], ["softmax", "bn+sh"], range(2), epochs=2)
    assert found.cells["JapaneseVowels", "softmax"].last.keys() == {0, 1}
    written = {path.suffix: path.read_text() for path in (tmp_path / "reports").iterdir()}
    assert set(written) == {".md", ".csv", ".tex"}
    assert set(found.csv().splitlines()[1:5]) <= set(written[".csv"].splitlines())
    assert found.markdown().splitlines()[4:7] == written[".md"].splitlines()[4:7]

    monkeypatch.setattr(Ensemble, "step", None)
    again = call(*part)
    assert again.exit_code == 0 and "2 of 4 runs are recorded, 2 to go" in again.stdout
    assert {path.suffix: path.read_text() for path in (tmp_path / "reports").iterdir()} == written


def test_a_set_that_cannot_be_read_does_not_keep_the_next_one_waiting(tmp_path, monkeypatch):
    (tmp_path / "BasicMotions.zip").write_bytes(b"PK\3\4 no zip")
    monkeypatch.setenv("PRIMALDUAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("primaldual.paper.families.load", lambda name, *given, **options: (
        load(name, *given, **options) if name == "BasicMotions" else replace(toy(40), name=name)))  # fmt: skip
    result = call("table-uea-more", "--only", "BasicMotions,Epilepsy", "--mechanisms", "softmax", "--seeds", 1,
                  "--epochs", 1, "--output", tmp_path / "runs", "--data-dir", tmp_path)  # fmt: skip
    assert result.exit_code == 0, result.output
    assert [record.data["name"] for record in Store(tmp_path / "runs").records()] == ["Epilepsy"]
    assert "missing set BasicMotions" in result.stdout and "not a whole zip file" in result.stdout


def test_a_failed_member_is_shown(tmp_path, short_series):
    part = ("table-uea-more", "--only", "BasicMotions", "--mechanisms", "softmax,qk-norm", "--epochs", 1,
            "--output", tmp_path)  # fmt: skip
    assert call(*part, "--seeds", 2).exit_code == 0
    path = next(tmp_path.glob("*.json"))
    content = json.loads(path.read_text())
    content = {name: x for name, x in content.items() if name != "sha256"}
    Store(tmp_path).add(Record.from_dict(content | {"failure": "the loss is not finite in epoch 1"}))
    result = call(*part, "--seeds", 2, "--only-report")
    assert result.exit_code == 0 and "(1 of 2)" in result.stdout
    assert f"seed {content['seed']}: the loss is not finite in epoch 1" in result.stdout


def test_a_dry_run_says_what_would_run_and_writes_nothing(tmp_path):
    result = call("table-uea-more", "--only", "BasicMotions,Epilepsy", "--seeds", 3, "--output", tmp_path, "--dry-run")
    assert result.exit_code == 0, result.output
    assert "BasicMotions, bn+sh: seeds 0, 1, 2, 400 epochs" in result.stdout
    assert "0 of 8 runs are recorded, 8 to go" in result.stdout
    assert "missing set Epilepsy:" in result.stdout and "missing set BasicMotions" not in result.stdout
    assert not list(tmp_path.iterdir())


def test_nothing_measured_is_no_success(tmp_path):
    result = call("table-regression", "--output", tmp_path, "--only-report")
    assert result.exit_code == 1 and result.stdout.count("missing set") == 6


def test_a_stopped_run_says_how_to_go_on(tmp_path, monkeypatch):
    def stopped(jobs, place):
        raise KeyboardInterrupt

    monkeypatch.setitem(ENGINES, "local", stopped)
    result = call("table-uea", "--only", "JapaneseVowels", "--output", tmp_path)
    assert result.exit_code == 130
    assert "stopped; the same command goes on" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("table-eua",), "did you mean 'table-uea'?"),
        (("table-uea", "--only", "Libras"), "table-uea has no set 'Libras'"),
        (("table-uea", "--engine", "ray"), "--engine must be one of local; got 'ray'"),
        (("table-uea", "--dtype", "float8"), "float8"),
    ],
)
def test_what_is_not_there_is_one_line(arguments, message, tmp_path):
    result = call(*arguments, "--output", tmp_path)
    assert result.exit_code == 2
    (line,) = result.stderr.strip().splitlines()
    assert message in line
