"""`primaldual reproduce` on long sequences: tables and the distances of heads, from files of a few short documents."""

import json

import pytest
from typer.testing import CliRunner, Result

from primaldual.cli import app
from primaldual.training import Store

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def documents(tmp_path):
    """Pairs of documents as LRA's files have them; related ones share a word."""
    folder = tmp_path / "raw"
    folder.mkdir()
    for part, many in (("train", 64), ("eval", 6), ("test", 10)):
        rows = [
            f"{i % 2:.1f}\t{part}{i}\t{part}{i}x\tword {i % 7} {'ab' * i}\tword {i % 5} {'ba' * i}" for i in range(many)
        ]
        again = "0.0\ttrain0\ttrain0x\tword 0 \tword 0 "  # the first of the training pairs, in every part
        (folder / f"new_aan_pairs.{part}.tsv").write_text("\n".join([*rows, again]) + "\n")
    return folder


def call(table: str, documents, output, *more: object) -> Result:
    options = ["--only", "lra-retrieval-manpages", "--seeds", 2, "--steps", 2, "--dtype", "float32", "--device", "cpu"]
    options += ["--data-dir", documents, "--output", output, *more]
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["reproduce", table, *map(str, options)])


def test_a_table_and_the_distances_of_its_models_heads_are_measured_once(documents, tmp_path):
    output = tmp_path / "runs"
    mechanisms = ("--mechanisms", "softmax,bn+sh")
    first = call("table-lra", documents, output, *mechanisms)
    assert first.exit_code == 0, first.output
    assert "Retrieval (manual pages)" in first.stdout and "selected" in first.stdout
    assert "79.68" not in first.stdout  # the paper's number is of other text
    assert "pairs" in first.stdout and "training" in first.stdout.partition("note: Retrieval (manual pages):")[2]
    assert "NOT the paper's recipe: steps 2 instead of 30000" in first.stdout
    records = Store(output).records()
    assert len(records) == 4 and all(r.selected and r.last and not r.best for r in records)

    second = call("table-head-distance", documents, output, *mechanisms)
    assert second.exit_code == 0, second.output
    assert "2 of 2 runs are recorded" in second.stdout and "2.01" in second.stdout and "repeated" in second.stdout
    found = json.loads((output / "reports" / "table-head-distance.json").read_text())
    assert found["data"] == "Retrieval (manual pages)" and {len(x) for x in found["mechanisms"].values()} == {2}


def test_distances_are_of_trained_models_of_one_set(documents, tmp_path):
    untrained = call("table-head-distance", documents, tmp_path / "runs", "--only-report")
    assert untrained.exit_code == 1 and "no trained model of lra-retrieval-manpages" in untrained.output
    several = call("table-head-distance", documents, tmp_path / "runs", "--only", "lra-text,lra-image")
    assert several.exit_code == 2 and "is of one set" in several.output
    epochs = call("table-lra", documents, tmp_path / "runs", "--epochs", 3)
    assert epochs.exit_code == 2 and "give epochs or steps" in epochs.output
