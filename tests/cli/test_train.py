"""`primaldual train`: one's own data, in one command."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from primaldual.cli import app
from primaldual.models import SeriesSizes
from primaldual.training import Ensemble, Recipe, Store, Training
from training.toy import toy

QUICK = ("--epochs", "2", "--batch-size", "16", "--device", "cpu")


@pytest.fixture(autouse=True)
def small_models(monkeypatch):
    """The recipe's sizes, shrunk."""

    def shrunk(data, encoder=None):
        return Recipe(SeriesSizes(encoder or "mvts", d_model=16, layers=1, feedforward=16), epochs=400)

    monkeypatch.setattr("primaldual.paper.recipe_for", shrunk)


@pytest.fixture
def file(tmp_path) -> Path:
    """A training and a test file in the archive's format."""
    data = toy(24, 12)
    for name, split in (("TRAIN", data.train), ("TEST", data.test)):
        lines = ["@problemName Mine", "@equalLength false", "@classLabel true a b c", "@data"]
        for x, length, y in zip(split.x, split.lengths, split.y, strict=True):
            channels = (",".join(f"{v:.6g}" for v in channel[:length].tolist()) for channel in x.T)
            lines.append(":".join([*channels, "abc"[int(y)]]))
        (tmp_path / f"Mine_{name}.ts").write_text("\n".join(lines) + "\n")
    return tmp_path / "Mine_TRAIN.ts"


def call(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["train", *map(str, arguments)])


def one_line(result: Result) -> str:
    (line,) = result.stderr.strip().splitlines()
    return line


def test_a_file_is_trained_on_and_recorded(file, tmp_path):
    out = tmp_path / "runs"
    result = call(file, "--mechanism", "bn+sh", "--beta", 0.3, "--scales", "1,1,1,1,2,2,2,2", "--seeds", 2,
                  "--lr", 0.01, "--output", out, *QUICK)  # fmt: skip
    assert result.exit_code == 0, result.output
    records = Store(out).records()
    assert {record.seed for record in records} == {0, 1}
    for record in records:
        recipe = record.recipe
        assert (recipe["epochs"], recipe["batch_size"], recipe["learning_rate"]) == (2, 16, 0.01)
        assert recipe["model"]["attention_dropout"] == 0.0 and recipe["model"]["dropout"] == 0.1
        assert record.mechanism["inputs"][0]["beta"] == 0.3
        assert record.mechanism["training_set"]["scales"] == [1, 1, 1, 1, 2, 2, 2, 2]
        assert f"{record.last.value:.2f} (epoch 2)" in result.stdout
        assert Store(out).model(record.key).config.length == 12
    assert "mean ± std" in result.stdout
    rows = [line.split(",") for path in (out / "logs").glob("*.csv") for line in path.read_text().splitlines()]
    assert [row[:2] for row in rows] == [["epoch", "seed"], ["1", "0"], ["1", "1"], ["2", "0"], ["2", "1"]]


def test_of_one_s_own_data_nothing_is_shown_that_was_chosen_on_the_test_set(file, tmp_path):
    shown = call(file, "--output", tmp_path / "runs", *QUICK).stdout
    assert "best" not in shown and "last: after the last epoch" in shown
    shown = call(file, "--validation", 0.25, "--output", tmp_path / "runs", *QUICK).stdout
    assert re.search(r"seed +selected +last", shown) and "best:" not in shown


def test_a_seed_that_fails_takes_no_part_in_the_mean(file, tmp_path, monkeypatch):
    whole = Training.run

    def run(self, *given):
        whole(self, *given)
        self.failures[1] = "the loss or its gradient is not finite in epoch 2"

    monkeypatch.setattr(Training, "run", run)
    result = call(file, "--seeds", 3, "--output", tmp_path / "runs", *QUICK)
    assert result.exit_code == 0, result.output
    records = {record.seed: record for record in Store(tmp_path / "runs").records()}
    mean = (records[0].last.value + records[2].last.value) / 2
    assert re.search(rf"mean ± std +{mean:.2f} ± \S+ \(2 of 3\)", result.stdout)
    assert re.search(r"\n +1 +– +the loss or its gradient is not finite", result.stdout)


def test_the_same_command_again_trains_nothing(file, tmp_path, monkeypatch):
    first = call(file, "--output", tmp_path / "runs", *QUICK)
    monkeypatch.setattr(Ensemble, "step", None)
    again = call(file, "--output", tmp_path / "runs", *QUICK)
    assert again.exit_code == 0 and again.stdout == first.stdout


def test_an_archive_s_set_is_found_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIMALDUAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PRIMALDUAL_DATA", raising=False)
    result = call("JapaneseVowels", "--epochs", 1, "--encoder", "flowformer", "--output", tmp_path, "--device", "cpu")
    assert result.exit_code == 0, result.output
    (record,) = Store(tmp_path).records()
    assert record.data["name"] == "JapaneseVowels" and record.recipe["model"]["encoder"] == "flowformer"


def test_a_validation_share_gives_a_third_score(file, tmp_path):
    result = call(file, "--validation", 0.3, "--patience", 1, "--output", tmp_path / "runs", *QUICK)
    assert result.exit_code == 0, result.output
    assert "selected" in result.stdout and "by the validation share" in result.stdout


def test_without_a_test_file_it_is_said_and_validation_is_shown(file, tmp_path):
    alone = file.rename(file.with_name("alone.ts"))
    result = call(alone, "--validation", 0.25, "--output", tmp_path / "runs", *QUICK)
    assert result.exit_code == 0 and "there are no test series" in result.stdout
    (record,) = Store(tmp_path / "runs").records()
    assert f"{record.validation.value:.2f} (epoch {record.validation.at})" in result.stdout
    assert "Mine, softmax: test" not in result.stdout and "best:" not in result.stdout


def test_what_was_done_to_the_series_is_said(file, tmp_path):
    file.write_text(re.sub(r"\n[^,@]+,", "\n?,", file.read_text(), count=1))
    result = call(file, "--output", tmp_path / "runs", *QUICK)
    assert result.exit_code == 0 and "training: 1 missing values interpolated" in result.stdout


def test_training_runs_on_as_many_threads_as_are_given(file, tmp_path, monkeypatch):
    seen = []
    step = Ensemble.step
    monkeypatch.setattr(
        Ensemble, "step", lambda self, *given: (seen.append(torch.get_num_threads()), step(self, *given))[1]
    )
    torch.set_num_threads(2)
    try:
        call(file, "--output", tmp_path / "runs", *QUICK)
        assert set(seen) == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("--mechanism", "magic"), 2, "unknown mechanism 'magic'"),
        (("--mechanism", "sh", "--beta", "1"), 2, "no option 'beta'"),
        (("--mechanism", "sh", "--scales", "1,2"), 2, "one scale per head"),
        (("--encoder", "lstm"), 2, "encoder must be one of"),
        (("--dtype", "int8"), 2, "dtype must be one of"),
        (("--lr", "-1"), 2, "learning_rate must be a positive number"),
        (("--patience", "3"), 2, "patience needs a validation share"),
        (("--device", "toaster"), 2, "--device takes cpu, cuda or cuda:N"),
        (("--device", "cuda:99"), 2, "CUDA devices"),
    ],
)
def test_bad_options_fail_in_one_line(file, tmp_path, arguments, status, said):
    result = call(file, "--output", tmp_path / "runs", *arguments)
    assert result.exit_code == status and said in one_line(result)
    assert not (tmp_path / "runs").exists()


def test_a_file_that_is_not_there_fails_in_one_line(tmp_path):
    result = call(tmp_path / "None_TRAIN.ts", "--output", tmp_path)
    assert result.exit_code == 1 and "there is no file" in one_line(result)


@pytest.mark.parametrize(("option", "module"), [("--tensorboard", "torch.utils.tensorboard"), ("--tune", "optuna")])
def test_a_missing_package_is_named(file, tmp_path, monkeypatch, option, module):
    monkeypatch.setitem(sys.modules, module, None)
    result = call(file, "--mechanism", "bn", option, "--output", tmp_path / "runs", *QUICK)
    assert result.exit_code == 1
    assert re.search(r"needs (tensorboard|optuna): pip install \1", one_line(result))


def test_curves_and_tuning_where_the_packages_are(file, tmp_path):
    pytest.importorskip("optuna")
    pytest.importorskip("tensorboard")
    out = tmp_path / "runs"
    result = call(file, "--mechanism", "bn", "--tune", "--trials", 2, "--tensorboard", "--output", out, *QUICK)
    assert result.exit_code == 0, result.output
    assert "trial 0: beta 1" in result.stdout and "best of 2 trials" in result.stdout
    (record,) = Store(out).records()
    assert record.recipe["validation"] == 0.0 and list((out / "tensorboard").rglob("events*"))
    tried = [json.loads(path.read_text()) for path in (out / "tune").glob("*.json")]
    assert tried and all(one["recipe"]["validation"] == 0.2 for one in tried)


def test_a_run_that_fails_says_so_and_has_status_1(file, tmp_path):
    result = call(file, "--lr", "1e38", "--dtype", "float32", "--output", tmp_path / "runs", "--epochs", 6,
                  "--device", "cpu")  # fmt: skip
    assert result.exit_code == 1 and "not finite" in result.stdout


def test_targets_of_a_file_may_have_any_unit(file, tmp_path):
    for path in (file, file.with_name("Mine_TEST.ts")):
        text = path.read_text().replace("@classLabel true a b c", "@targetLabel true")
        path.write_text(re.sub(":([abc])$", lambda m: f":{1000 + ord(m[1])}", text, flags=re.M))
    result = call(file, "--output", tmp_path / "runs", *QUICK)
    assert result.exit_code == 0, result.output
    (record,) = Store(tmp_path / "runs").records()
    assert record.metric == "rmse" and record.last.value < 10
