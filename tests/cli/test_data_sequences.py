"""`primaldual data` shows and prepares long sequences beside time series."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from data.files import folder
from data.sequences.files import REVIEWS, imdb, pairs
from primaldual.cli import app
from primaldual.data.sequences import known, listops
from primaldual.data.sequences.catalogue import Generator
from primaldual.data.text import loading as text


@pytest.fixture
def call(tmp_path: Path):
    def run(*arguments: str, **env: str) -> Result:
        settings = {"COLUMNS": "100", "PRIMALDUAL_CACHE": str(tmp_path / "cache"), "PRIMALDUAL_DATA": ""} | env
        return CliRunner(env=settings).invoke(app, ["data", *arguments])

    return run


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets as small as the tests' files, in place of the published ones."""
    made = Generator(listops, {"brackets": False, "sizes": (3, 2, 2)})
    monkeypatch.setitem(known(), "lra-listops", replace(known()["lra-listops"], cases=(3, 2, 2), made=made))
    monkeypatch.setitem(known(), "lra-text", replace(known()["lra-text"], cases=(3, 2, 2)))
    monkeypatch.setitem(text.KNOWN, "text-imdb", (2, 1, 2))


def row(result: Result, name: str) -> list[str]:
    (line,) = (line for line in result.stdout.splitlines() if line.strip().startswith(f"{name} "))
    return line.split(maxsplit=4)


def test_list_shows_every_set_and_where_it_is_in_80_columns(call, tmp_path):
    directory = str(pairs(imdb(tmp_path / "raw")))
    assert call("prepare", "lra-text", "--data-dir", directory).exit_code == 0
    result = call("list", PRIMALDUAL_DATA=directory, COLUMNS="80")
    assert [one.strip() for one in row(result, "lra-text")] == ["lra-text", "3+2+2", "4096", "2", "cache, data"]
    assert [one.strip() for one in row(result, "lra-retrieval")[1:]] == ["147086+18090+17437", "4096", "2", "–"]
    assert row(result, "lra-retrieval-manpages")[4].strip() == "data"
    assert row(result, "lra-listops")[4].strip() == "to generate"
    shown = [line for line in result.stdout.splitlines() if "lra-" in line]
    assert len(shown) == len(known()) and all(len(line) <= 80 and "…" not in line for line in shown)
    assert row(result, "JapaneseVowels")[1] == "270+370"


def test_prepare_generates_and_reads_and_takes_time_series_along(call, tmp_path):
    directory = str(imdb(folder(tmp_path / "raw")))
    result = call("prepare", "lra-listops", "lra-text", "Toy", "--data-dir", directory, "--processes", "1")
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert "ok lra-listops: 3 + 2 + 2 sequences of up to" in said and "ok Toy: 3 + 3 series" in said
    assert "ok lra-text: 3 + 2 + 2 sequences of up to 4000 tokens, 2 classes" in said
    assert "validation and test are the same reviews" in said


def test_all_prepares_what_is_in_the_data_directory_and_generates_nothing(call, tmp_path):
    directory = str(pairs(imdb(folder(tmp_path / "raw"))))
    result = call("prepare", "--all", "--data-dir", directory)
    assert result.exit_code == 0, result.output
    assert [line.split()[1] for line in result.stdout.splitlines() if line.startswith("ok")] == [
        "Toy:", "lra-text:", "lra-retrieval-manpages:", "text-imdb:",
    ]  # fmt: skip
    assert "2 + 1 + 2 pairs of sequences" in result.stdout


def test_info_says_what_a_set_holds(call, tmp_path):
    result = call("info", "lra-text", "--data-dir", str(imdb(tmp_path / "raw")))
    for expected in (
        "3 training, 2 validation, 2 test", "5: 3 to 4000 tokens, mean 811 ± 1595", "4096 after padding", "257 ids",
        "negative (1), positive (2)", "aclImdb_v1.tar.gz", "the same reviews",
    ):  # fmt: skip
        assert expected.replace(" ", "") in "".join(result.stdout.split())  # long paths are broken anywhere


def test_info_does_not_generate(call):
    result = call("info", "lra-listops")
    assert result.exit_code == 1 and "primaldual data prepare lra-listops generates it" in result.stderr
    assert call("prepare", "lra-listops", "--processes", "1").exit_code == 0
    assert "3 training, 2 validation, 2 test" in call("info", "lra-listops").stdout


def test_verify_finds_tampered_and_stale_sets(call, tmp_path):
    directory = str(imdb(folder(tmp_path / "raw")))
    call("prepare", "lra-text", "lra-listops", "Toy", "--data-dir", directory, "--processes", "1")
    good = call("verify", "--data-dir", directory)
    assert good.exit_code == 0 and "3 of 3" in good.stdout
    about = json.loads((tmp_path / "cache" / "sequences" / "lra-text" / "manifest.json").read_text())
    assert f"ok lra-text: 3 + 2 + 2 sequences of up to 4000 tokens, 2 classes, {about['hash'][:12]}" in good.stdout
    tokens = tmp_path / "cache" / "sequences" / "lra-listops" / "tokens.npy"
    content = bytearray(tokens.read_bytes())
    content[-1] ^= 1
    tokens.write_bytes(content)
    imdb(tmp_path / "raw", reviews=REVIEWS | {"aclImdb/test/pos/0_10.txt": b"No?!"})
    bad = call("verify", "--data-dir", directory)
    assert bad.exit_code == 1 and "1 of 3" in bad.stdout
    assert "tokens.npy is damaged: it does not have the hash" in bad.stderr
    assert "lra-text: it was prepared from other files than" in bad.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("info", "lra-lstops"), "did you mean 'lra-listops'?"),
        (("info", "listops"), "did you mean 'lra-listops'?"),
        (("prepare", "lra-image"), "get cifar-10-python.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html"),
        (("verify", "lra-text"), "it is not prepared"),
    ],
)
def test_errors_are_one_line(call, arguments, message):
    result = call(*arguments)
    assert result.exit_code == 1
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ") and message in line
