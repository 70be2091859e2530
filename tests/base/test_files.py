"""A file is whole or the one that was there before; nothing else is left behind."""

import ast
import errno
import math
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from primaldual.base import files
from primaldual.base.files import remove, replacing, replacing_folder, write_json, write_text


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


def test_what_a_killed_process_left_is_removed_an_hour_later_by_whoever_writes_there(tmp_path):
    left = [tmp_path / name for name in (".one.json-a1b2c3_4", ".two.safetensors-abcd1234", ".new.json-abcd1234")]
    others = [tmp_path / name for name in (".gitignore-template", ".hidden", "three.json-abcd1234")]
    for path in (*left, *others):
        path.touch()
    for path in (*left[:2], *others):
        os.utime(path, (0, 0))
    write_text(tmp_path / "more.json", "{}")
    assert {path.name for path in tmp_path.iterdir()} == {"more.json", left[2].name, *(path.name for path in others)}


def content(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_folder_is_replaced_whole_and_a_failed_one_leaves_the_earlier(tmp_path):
    path = tmp_path / "deep" / "set"
    with replacing_folder(path) as scratch:
        (scratch / "a").write_text("1")
    with pytest.raises(RuntimeError), replacing_folder(path) as scratch:
        (scratch / "a").write_text("half of it")
        raise RuntimeError
    assert content(path) == {"a": "1"}
    with replacing_folder(path) as scratch:
        (scratch / "b").write_text("2")
    assert content(path) == {"b": "2"} and list(path.parent.iterdir()) == [path]


def test_a_folder_does_not_take_the_place_of_a_file(tmp_path):
    (path := tmp_path / "set").write_text("a file")
    with pytest.raises(NotADirectoryError), replacing_folder(path):
        pass
    assert list(tmp_path.iterdir()) == [path] and path.read_text() == "a file"


def test_all_that_write_one_folder_at_once_leave_a_whole_one(tmp_path):
    def write(me: int) -> None:
        for _ in range(50):
            with replacing_folder(tmp_path / "set") as scratch:
                for name in "ab":
                    (scratch / name).write_text(str(me))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert len(set(content(tmp_path / "set").values())) == 1 and list(tmp_path.iterdir()) == [tmp_path / "set"]


def test_what_a_killed_process_had_begun_is_no_folder_and_goes_after_a_while(tmp_path, monkeypatch):
    script = f"""if True:
        import os, pathlib, signal
        from files import replacing_folder
        with replacing_folder(pathlib.Path({str(tmp_path / "set")!r})) as scratch:
            (scratch / "a").write_text("half of it")
            os.kill(os.getpid(), signal.SIGKILL)
    """
    killed = subprocess.run([sys.executable, "-c", script], cwd=Path(files.__file__).parent)
    assert killed.returncode == -signal.SIGKILL
    (begun,) = tmp_path.iterdir()
    assert begun.name.startswith(".set-")
    with replacing_folder(tmp_path / "set"):
        assert begun.is_dir()  # for all that is known, a process on another machine still fills it
    monkeypatch.setattr(files, "ABANDONED", -1)
    with replacing_folder(tmp_path / "set"):
        assert not begun.is_dir()


def test_the_library_writes_its_files_here_alone():
    source = Path(files.__file__).parents[1]
    writing = {"write_text", "write_bytes", "savefig", "mkstemp", "save_file", "dump", "tofile", "touch"}
    found = set()
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            into_memory = bool(node.args) and ast.unparse(node.args[0]) in ("buffer", "scratch")
            into_memory |= ast.unparse(node.func.value).startswith("scratch / ")  # of `replacing_folder`
            modes = [
                one.value for one in (*node.args, *(k.value for k in node.keywords)) if isinstance(one, ast.Constant)
            ]
            opened = node.func.attr == "open" and any(str(mode)[:1] in "wax" for mode in modes)
            if (node.func.attr in writing or opened) and not into_memory:
                found.add(str(path.relative_to(source)))
    assert found == {"base/files.py"}
