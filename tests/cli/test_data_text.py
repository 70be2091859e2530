"""`primaldual data` shows, prepares and checks text beside the other sets."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from data.sequences.files import imdb
from primaldual.cli import app
from primaldual.data.text import load
from primaldual.data.text import loading as text


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(text.KNOWN, "text-imdb", (2, 1, 2))
    monkeypatch.setenv("PRIMALDUAL_CACHE", str(tmp_path / "cache"))

    def run(*arguments: object, **env: str) -> Result:
        settings = {"COLUMNS": "120", "PRIMALDUAL_DATA": ""} | env
        return CliRunner(env=settings).invoke(app, ["data", *map(str, arguments)])

    return run


def test_it_is_listed_prepared_and_described(call, tmp_path):
    directory = imdb(tmp_path / "raw")
    (line,) = (one for one in call("list").stdout.splitlines() if "text-imdb" in one)
    assert line.split() == ["text-imdb", "2+1+2", "–"]
    done = call("prepare", "text-imdb", "--data-dir", directory)
    assert done.exit_code == 0, done.output
    assert "ok text-imdb: 2 + 1 + 2 documents of" in done.stdout and "train/unsup, are not read" in done.stdout
    (line,) = (one for one in call("list", "--data-dir", directory).stdout.splitlines() if "text-imdb" in one)
    assert line.split(maxsplit=2)[2].strip() == "cache, data"
    said = "".join(call("info", "text-imdb").stdout.split())
    assert "2training,1validation,2test" in said and "256differentones(bytes)" in said


def test_what_is_kept_of_a_file_is_listed_and_checked_too(call, tmp_path):
    path = tmp_path / "mine.txt"
    path.write_bytes(b"some text " * 50)
    load(path)
    (folder,) = (tmp_path / "cache" / "text").iterdir()
    assert folder.name in call("list").stdout and "451 training" in call("info", folder.name).stdout
    good = call("verify")
    assert good.exit_code == 0 and "ok mine: 1 + 1 + 1 documents of" in good.stdout and "1 of 1" in good.stdout
    content = bytearray((folder / "tokens.bin").read_bytes())
    content[9] ^= 1
    (folder / "tokens.bin").write_bytes(content)
    bad = call("verify")
    assert bad.exit_code == 1 and "tokens.bin is damaged: it does not have the hash" in bad.stderr


def test_errors_are_one_line_that_says_where_to_get_it(call):
    for name, message in (("text-imdb", "get aclImdb_v1.tar.gz from https"), ("text-imbd", "did you mean 'text-imdb'")):
        result = call("prepare", name)
        (line,) = result.stderr.strip().splitlines()
        assert result.exit_code == 1 and line.startswith("error: ") and message in line
