"""`primaldual predict`: what train left, and what an estimator saved, say what they said."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from data.files import text
from primaldual.cli import app
from primaldual.data import load_files
from primaldual.data.sources import read_file
from primaldual.training import Store, train
from training.toy import small

HEADER = text().partition("@data")[0].replace("b A", "a b")


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["predict", *map(str, arguments), "--device", "cpu"])


def waves(cases: int, target: bool = False) -> str:
    """Series of unequal lengths whose level is the class, or the target; one value is missing."""
    draw = np.random.default_rng(cases)
    header = HEADER.replace("@classLabel true a b", "@targetLabel true") if target else HEADER
    rows = []
    for i in range(cases):
        level = draw.uniform(0, 2)
        label = f"{1000 + 50 * level:.3f}" if target else "ab"[int(level)]
        values = level + 0.1 * draw.normal(size=(2, 8 + i % 4))
        rows.append(":".join([*(",".join(f"{x:.4f}" for x in channel) for channel in values), label]))
    rows[0] = "?" + rows[0][6:]
    return header.replace("equalLength true", "equalLength false") + "@data\n" + "\n".join(rows) + "\n"


@pytest.fixture(params=[False, True], ids=["classes", "numbers"])
def trained(request, tmp_path) -> tuple[Path, Path]:
    """A model of train, and a file."""
    (tmp_path / "Mine_TRAIN.ts").write_text(waves(30, request.param))
    (tmp_path / "Mine_TEST.ts").write_text(waves(12, request.param))
    data = load_files(tmp_path / "Mine_TRAIN.ts").standardised()
    train(data, "bn+sh", small(dtype="float32", epochs=8, learning_rate=5e-3), folder=tmp_path / "runs")
    (model,) = (tmp_path / "runs" / "models").iterdir()
    return model, tmp_path / "Mine_TEST.ts"


def test_a_trained_model_predicts_new_series_as_its_record_says(trained, tmp_path):
    model, file = trained
    (record,) = Store(tmp_path / "runs").records()
    result = call(model, file)
    assert result.exit_code == 0, result.output
    heading, *rows = csv.reader(result.stdout.splitlines())
    assert len(rows) == 12 and [row[0] for row in rows] == [str(i) for i in range(1, 13)]
    if record.metric == "accuracy":
        assert heading == ["series", "predicted", "a", "b"]
        assert f"({record.last.value:.2f} %)" in result.stderr
        assert all(float(row[2 + "ab".index(row[1])]) >= 0.5 for row in rows)
    else:
        assert heading == ["series", "predicted"]
        assert f"root mean squared error {record.last.value:.4g}" in result.stderr
    again = call(model, file, "--output", tmp_path / "found.csv")
    assert again.stdout == "" and (tmp_path / "found.csv").read_text() == result.stdout


@pytest.mark.parametrize("recipe", ["modern", "paper"])
def test_a_saved_estimator_is_such_a_model(recipe, tmp_path):
    pytest.importorskip("aeon")
    from integrations.estimators import PAPER, TINY
    from primaldual.integrations.aeon import AttentionClassifier

    (tmp_path / "X.ts").write_text(waves(24))
    data = load_files(tmp_path / "X.ts")
    draw = np.random.default_rng(0)
    X = [draw.normal(size=(2, 8)) + i % 2 for i in range(16)]
    model = AttentionClassifier("bn", **{"modern": TINY, "paper": PAPER}[recipe], n_members=2)
    model.fit(X, np.array(["low", "high"] * 8)).save(tmp_path / "model")
    with torch.no_grad():
        result = call(tmp_path / "model", tmp_path / "X.ts")
    assert result.exit_code == 0, result.output
    assert "longer than every series of fit" in result.stderr and "as they are labelled" not in result.stderr
    heading, *rows = csv.reader(result.stdout.splitlines())
    assert heading == ["series", "predicted", "high", "low"] and len(rows) == len(data.train)
    with pytest.warns(UserWarning, match="longer than every series of fit"):
        expected = model.predict_proba([one.T for one in read_file(tmp_path / "X.ts").series])
    np.testing.assert_allclose([[float(x) for x in row[2:]] for row in rows], expected, atol=1e-6)


def test_what_cannot_be_fails_in_one_line(trained, tmp_path):
    model, file = trained
    (tmp_path / "other.ts").write_text(waves(5).replace("@dimensions 2", "@dimensions 1").replace(":", ",", 0))
    (tmp_path / "one.ts").write_text("@dimensions 1\n@classLabel true a b\n@data\n1,2,3:a\n1,2,4:b\n")
    (tmp_path / "bad").write_bytes(model.read_bytes()[:-9])
    for arguments, said in {
        (model, tmp_path / "one.ts"): "has 1 channels, the model takes 2",
        (tmp_path / "bad", file): "is damaged",
        (tmp_path / "none", file): "there is no file",
        (model, tmp_path / "none.ts"): "none.ts",
        (file, file): "is damaged, or no file of primaldual",
    }.items():
        result = call(*arguments)
        (line,) = result.stderr.strip().splitlines()
        assert result.exit_code == 1 and said in line
