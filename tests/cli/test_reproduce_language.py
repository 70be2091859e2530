"""`primaldual reproduce table-language`: language models of a few reviews, with the plot of loss against FLOPs."""

import csv
import json
from statistics import fmean, stdev

import pytest
from typer.testing import CliRunner, Result

from data.sequences.files import imdb
from primaldual.cli import app
from primaldual.data.text import loading as text
from primaldual.models import LANGUAGE_SIZES, LanguageSizes
from primaldual.models.language_flops import flops
from primaldual.paper.language import jobs
from primaldual.training import Ensemble, Store

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def reviews(tmp_path, monkeypatch):
    """A small archive in place of the published one, and sizes to match."""
    monkeypatch.setitem(text.KNOWN, "text-imdb", (19, 1, 20))
    monkeypatch.setitem(LANGUAGE_SIZES, "small", LanguageSizes(12, 3, 1, 16, 32))
    monkeypatch.setitem(LANGUAGE_SIZES, "large", LanguageSizes(24, 6, 2, 32, 32))
    said = {
        f"aclImdb/{part}/{label}/{i}_5.txt": f"{part} {label} {i}: nothing is said, nothing is known of it.".encode()
        for part in ("train", "test")
        for label in ("pos", "neg")
        for i in range(10)
    }
    return imdb(tmp_path / "raw", reviews=said)


def call(reviews, output, *more: object) -> Result:
    options = ["--dtype", "float32", "--device", "cpu", "--data-dir", reviews, "--output", output, *more]
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["reproduce", "table-language", *map(str, options)])


def test_it_is_measured_once_at_two_sizes_and_reported(reviews, tmp_path, monkeypatch):
    output = tmp_path / "runs"
    part = ("--seeds", 2, "--steps", 3, "--mechanisms", "softmax,sh")
    first = call(reviews, output, *part)
    assert first.exit_code == 0, first.output
    for said in ("0 of 4 runs are recorded", "table-language: small, bits per byte of IMDb", "table-language: large",
                 "NOT this table's recipe: steps 3 instead of 1500", "NOT this table's recipe: dtype float32",
                 "IMDb: reviews as they stand"):  # fmt: skip
        assert said in first.stdout
    records = Store(output).records()
    assert len(records) == 8 and {len(record.members) for record in records} == {1}
    folder = output / "reports"
    assert {path.suffix for path in folder.iterdir()} == {".md", ".csv", ".tex", ".png"}
    assert (folder / "table-language.png").read_bytes()[:4] == b"\x89PNG"

    rows = list(csv.DictReader((folder / "table-language.csv").read_text().splitlines()))
    assert len(rows) == 8
    wanted = jobs(seeds=range(2), steps=3, dtype="float32", mechanisms=["softmax", "sh"])
    for (size, column), job in wanted.items():
        (row,) = (r for r in rows if (r["size"], r["mechanism"], r["kind"]) == (size, column, "last"))
        values, base = ([r.last.value for r in records if r.mechanism == wanted[size, name].primal.to_dict()
                         and r.recipe == job.recipe.to_dict()] for name in (column, "softmax"))  # fmt: skip
        assert float(row["mean"]) == pytest.approx(fmean(values), rel=1e-5)
        assert float(row["std"]) == pytest.approx(stdev(values), rel=1e-3)
        counted = flops(LANGUAGE_SIZES[size].config(256, job.primal))
        assert float(row["flops_training"]) == pytest.approx(counted.training, rel=1e-5)
        assert float(row["tokens_per_second"]) > 0 and row["device"] == records[0].environment["device"]
        gain = 100 * (1 - fmean(values) / fmean(base))
        assert column == "softmax" or float(row["gain_percent"]) == pytest.approx(gain, abs=1e-4)

    monkeypatch.setattr(Ensemble, "step", None)
    again = call(reviews, output, *part, "--mechanisms", "sh,softmax", "--only-report")
    assert again.exit_code == 0 and again.stdout.index(" sh ") < again.stdout.index(" softmax ")


def test_what_is_missing_or_failed_is_said(reviews, tmp_path):
    part = ("--only", "small", "--steps", 2, "--mechanisms", "softmax,qk-norm")
    assert call(reviews, tmp_path, *part, "--seeds", 1).exit_code == 0
    path = next(tmp_path.glob("*.json"))
    record = {name: x for name, x in json.loads(path.read_text()).items() if name != "sha256"}
    path.write_text(json.dumps(record | {"failure": "the loss is not finite in step 1"}))
    result = call(reviews, tmp_path, *part, "--seeds", 2, "--only-report")
    assert result.exit_code == 0, result.output
    assert "(1 of 2)" in result.stdout and "seed 0: the loss is not finite in step 1" in result.stdout
    assert "not run: text-imdb, softmax, small, seeds 1" in result.stdout
    nothing = call(reviews, tmp_path / "none", *part, "--only-report")
    assert nothing.exit_code == 1 and "missing set text-imdb" in nothing.stdout


def test_a_dry_run_says_what_would_run_and_where_to_get_the_text(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIMALDUAL_CACHE", str(tmp_path / "empty"))
    result = call(tmp_path, tmp_path / "runs", "--only", "large", "--mechanisms", "bn", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "text-imdb, bn, large: seeds 0, 1, 2, 3, 4, 1500 steps" in result.stdout
    assert "missing set text-imdb" in result.stdout and "get aclImdb_v1.tar.gz" in result.stdout


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--only", "big", "has no size 'big'"),
        ("--mechanisms", "shh", "there is no mechanism 'shh'; did you mean 'sh'?"),
        ("--mechanisms", "conv1d", "looks ahead"),
    ],
)
def test_unknown_names_are_one_line(tmp_path, option, value, message):
    result = call(tmp_path, tmp_path / "runs", option, value)
    (line,) = result.stderr.strip().splitlines()
    assert result.exit_code == 2 and message in line
