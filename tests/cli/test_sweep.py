"""`primaldual sweep`, on the sets inside the aeon package."""

import csv
from statistics import fmean

import pytest
from typer.testing import CliRunner, Result

from primaldual.cli import app
from primaldual.primal import mechanism
from primaldual.training import Ensemble, Store

pytestmark = pytest.mark.usefixtures("cache")


def call(*arguments: object) -> Result:
    options = ["--device", "cpu", "--offline"]
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["sweep", *map(str, arguments), *options])


def test_a_sweep_is_trained_reported_and_never_trained_again(tmp_path, monkeypatch, short_series):
    part = ("beta", "--only", "BasicMotions", "--values", "0,1", "--seeds", 2, "--epochs", 2, "--output", tmp_path)
    first = call(*part)
    assert first.exit_code == 0, first.output
    for text in ("0 of 3 runs are recorded, 3 to go", "epochs 2 instead of 400", "validation 0.2 instead of 0.0",
                 "The best single value is β"):  # fmt: skip
        assert text in first.stdout
    records = Store(tmp_path).records()
    assert len(records) == 6  # softmax, β 1, and the paper's 0.1; two seeds each
    folder = tmp_path / "reports"
    assert sorted(path.name for path in folder.iterdir()) == [f"sweep-beta-bn.{end}" for end in ("csv", "md", "png")]
    written = {path.name: path.read_bytes() for path in folder.iterdir()}

    rows = {
        (row["set"], row["beta"]): row for row in csv.DictReader(written["sweep-beta-bn.csv"].decode().splitlines())
    }
    for text, primal in (("0", mechanism("softmax")), ("0.1", mechanism("bn", beta=0.1)), ("1", mechanism("bn"))):
        mine = [record for record in records if record.mechanism == primal.to_dict()]
        row = rows["BasicMotions", text]
        assert float(row["validation_mean"]) == pytest.approx(fmean(max(r.history["validation"]) for r in mine), 1e-5)
        assert float(row["test_mean"]) == pytest.approx(fmean(r.selected.value for r in mine), 1e-5)
        assert float(row["last_mean"]) == pytest.approx(fmean(r.last.value for r in mine), 1e-5)

    monkeypatch.setattr(Ensemble, "step", None)
    again = call(*part)
    assert again.exit_code == 0 and "3 of 3 runs are recorded, 0 to go" in again.stdout
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == written
    softmax_alone = call("scales", *part[1:4], "1,1,1,1,1,1,1,1;2,2,2,2,2,2,2,2", *part[5:], "--dry-run")
    assert "1 of 3 runs are recorded, 2 to go" in softmax_alone.stdout


def test_a_dry_run_says_what_would_run_and_writes_nothing(tmp_path):
    result = call("scales", "--mechanism", "bn+sh", "--beta", 0.5, "--only", "JapaneseVowels", "--seeds", 3,
                  "--output", tmp_path, "--dry-run")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "JapaneseVowels, bn+sh, scales 1,1,2,2,4,4,8,8: seeds 0, 1, 2, 400 epochs" in result.stdout
    assert "0 of 9 runs are recorded, 9 to go" in result.stdout
    assert not list(tmp_path.iterdir())


def test_the_examples_can_be_pasted_into_a_shell():
    shown = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["sweep", "--help"]).stdout
    assert "sweep scales --values '1,1,1,1,1,1,2,2;1,1,2,2,4,4,8,8'" in shown


def test_nothing_measured_is_no_success(tmp_path):
    result = call("beta", "--output", tmp_path, "--only-report")
    assert result.exit_code == 1 and result.stdout.count("missing set") == 3
    assert "Nothing to compare" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gamma",), "a sweep is of beta or scales; got 'gamma'"),
        (("beta", "--values", "0,half"), "--values takes numbers, such as 0,0.5,1; got '0,half'"),
        (("beta", "--values", "0,nan"), "beta"),
        (("beta", "--values", "1"), "two different values"),
        (("beta", "--beta", 1), "--beta is what the sweep is of; give --values"),
        (("scales", "--values", "1,1;2,x"), "--values takes a scale per head, such as 1,1,1,1;1,1,2,2; got '1,1;2,x'"),
        (("scales", "--values", "1,1;2,2"), "for 8 heads; give one scale per head"),
        (("scales", "--values", "1,1,1,1,1,1,1,0;2,2,2,2,2,2,2,2"), "every scale"),
        (("scales", "--beta", 1), "'sh' has no other setting than scales"),
        (("scales", "--mechanism", "bn"), "'bn' has no scales; those that have: sh, bn+sh"),
        (("beta", "--only", "Libra"), "there is no set 'Libra' to classify"),
        (("beta", "--validation", 0), "the test set never chooses"),
    ],
)
def test_what_cannot_be_swept_is_one_line(arguments, message, tmp_path):
    result = call(*arguments, "--output", tmp_path)
    assert result.exit_code == 2
    (line,) = result.stderr.strip().splitlines()
    assert message in line
