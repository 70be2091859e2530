"""A file is whole or the one that was there before; nothing else is left behind."""

import errno
import math
from pathlib import Path

import pytest

from primaldual.base.files import remove, replacing, write_json, write_text


def test_a_failed_write_leaves_the_earlier_file(tmp_path):
    path = tmp_path / "deep" / "one.json"
    write_json(path, {"records": [1]})
    with pytest.raises(ValueError):
        write_json(path, {"records": [math.nan]})
    with pytest.raises(RuntimeError), replacing(path) as scratch:
        scratch.write_text("half of it")
        raise RuntimeError
    assert path.read_text() == '{\n "records": [\n  1\n ]\n}\n'
    assert [file.name for file in path.parent.iterdir()] == ["one.json"]


def test_a_file_that_cannot_take_its_place_is_not_left_behind(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_text(tmp_path / "folder", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*one"):
        write_text(tmp_path / "one", "text")
    assert not list(tmp_path.iterdir())


def test_removing_a_file_takes_what_a_killed_process_left_along(tmp_path):
    for name in ("one", ".one-x1y2", ".other-x1y2"):
        (tmp_path / name).touch()
    remove(tmp_path / "one")
    assert [path.name for path in tmp_path.iterdir()] == [".other-x1y2"]
