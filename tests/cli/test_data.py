"""`primaldual data` lists, prepares, describes and verifies."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from data.files import archive, folder, text
from primaldual.cli import app


@pytest.fixture
def call(tmp_path: Path):
    def run(*arguments: str, **env: str) -> Result:
        settings = {"COLUMNS": "100", "PRIMALDUAL_CACHE": str(tmp_path / "cache"), "PRIMALDUAL_DATA": ""} | env
        return CliRunner(env=settings).invoke(app, ["data", *arguments])

    return run


def row(result: Result, name: str) -> list[str]:
    (line,) = (line for line in result.stdout.splitlines() if line.strip().startswith(f"{name} "))
    return line.split(maxsplit=4)


def test_list_names_every_known_set_and_where_it_is(call, tmp_path):
    directory = str(folder(tmp_path / "raw"))
    assert call("prepare", "Toy", "--data-dir", directory).exit_code == 0
    result = call("list", PRIMALDUAL_DATA=directory)
    assert result.exit_code == 0
    assert [part.strip() for part in row(result, "Toy")] == ["Toy", "–", "–", "–", "cache, data"]
    assert row(result, "PEMS-SF")[:4] == ["PEMS-SF", "267+173", "144×963", "7"]
    assert "data" not in row(call("list"), "Toy")[4]


def test_prepare_goes_on_after_a_set_that_fails(call, tmp_path):
    folder(folder(tmp_path / "raw"), "Broken", train=text("1,2,3:4,x,6:a"))
    result = call("prepare", "--all", "--data-dir", str(tmp_path / "raw"))
    assert result.exit_code == 1
    assert "ok Toy: 3 + 3 series, 3 × 2, 2 classes" in result.stdout
    assert "Broken_TRAIN.ts, line 10: channel 2, step 2: 'x' is not a number" in result.stderr


def encrypted(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    for start in (raw.index(b"PK\1\2") + 8, 6):
        raw[start] |= 1
    path.write_bytes(raw)


def without_utf8(path: Path) -> None:
    """The name of a member is marked as UTF-8, and is none."""
    raw = bytearray(path.read_bytes().replace(b"Toy2_TRAIN.ts", b"\xff\xfe\xfd\xfc_TRAIN.ts"))
    for start in (raw.index(b"PK\1\2") + 8, 6):
        raw[start + 1] |= 8
    path.write_bytes(raw)


@pytest.mark.parametrize("damage", [encrypted, without_utf8])
def test_prepare_goes_on_after_a_zip_that_cannot_be_read(call, tmp_path, damage):
    damage(archive(tmp_path, "Toy2"))
    archive(tmp_path, "Toy3")
    result = call("prepare", "--all", "--data-dir", str(tmp_path))
    assert result.exit_code == 1 and "ok Toy3" in result.stdout
    (line,) = result.stderr.strip().splitlines()
    assert "Toy2.zip" in line


def test_a_set_that_cannot_be_kept_is_an_error_of_prepare_and_none_of_info(call, tmp_path):
    directory = str(folder(tmp_path / "raw"))
    (tmp_path / "cache").touch()  # no folder can be there
    result = call("prepare", "Toy", "--data-dir", directory)
    assert result.exit_code == 1 and "cannot be written" in result.stderr
    result = call("info", "Toy", "--data-dir", directory)
    assert result.exit_code == 0 and "3 training, 3 test" in result.stdout


def test_info_says_what_a_set_holds(call, tmp_path):
    result = call("info", "Toy", "--data-dir", str(folder(tmp_path / "raw")))
    for expected in ("3 training, 3 test", "a (2), b (1)", "classification", "missing values interpolated"):
        assert expected in result.stdout


def test_verify_finds_damaged_and_stale_sets(call, tmp_path):
    directory = str(folder(folder(tmp_path / "raw"), "Other"))
    assert call("verify").exit_code == 1
    call("prepare", "--all", "--data-dir", directory)
    good = call("verify", "--data-dir", directory)
    assert good.exit_code == 0 and "2 of 2" in good.stdout
    folder(tmp_path / "raw", train=text("1,2,3:4,5,6:a"))
    path = tmp_path / "cache" / "timeseries" / "Other.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    bad = call("verify", "--data-dir", directory)
    assert bad.exit_code == 1 and "0 of 2" in bad.stdout
    assert "Other: " in bad.stderr and "is damaged" in bad.stderr and "are others now" in bad.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("info", "Nothing", "--offline"), 1, "there is no data set Nothing"),
        (("info", "../x"), 1, "letters, digits"),
        (("prepare",), 2, "NAMEs of sets, or --all"),
        (("prepare", "--all"), 2, "--data-dir"),
        (("list", "--data-dir", "/nowhere"), 2, "does not exist"),
        (("verify", "Nothing"), 1, "not prepared"),
    ],
)
def test_errors_are_one_line(call, arguments, status, message):
    result = call(*arguments)
    assert result.exit_code == status
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ") and message in line


@pytest.mark.parametrize("command", ["list", "info", "prepare", "verify"])
def test_help_has_examples(call, command):
    assert f"primaldual data {command}" in call(command, "--help").stdout
