"""Sets by name: from the cache, else generated or read and kept; stale and damaged ones are made anew."""

import logging
import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from data.sequences.files import REVIEWS, cifar, imdb, pairs
from primaldual.data import DataMismatchError, DataNotFoundError
from primaldual.data.sequences import SequenceSet, known, listops, load, loading, raw, store
from primaldual.data.sequences.catalogue import Generator

read = partial(load, check=False)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRIMALDUAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PRIMALDUAL_DATA", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def small_listops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few expressions in place of the published 100,000."""
    made = Generator(listops, {"brackets": False, "sizes": (3, 2, 2)})
    monkeypatch.setitem(known(), "lra-listops", replace(known()["lra-listops"], cases=(3, 2, 2), made=made))


@pytest.mark.parametrize(
    ("name", "write", "title", "cases"),
    [
        ("lra-text", imdb, "Text", [3, 2, 2]),
        ("lra-image", cifar, "Image", [18, 2, 4]),
        ("lra-retrieval-manpages", pairs, "Retrieval (manual pages)", [2, 1, 2]),
    ],
)
def test_sets_are_read_from_a_folder_of_the_data_directory(tmp_path, name, write, title, cases):
    write(tmp_path / "raw" / "lra")
    data = read(name, tmp_path / "raw")
    assert (data.name, data.title, [len(part) for part in data.parts.values()]) == (name, title, cases)
    assert list(data.parts) == ["train", "validation", "test"]
    entry = known()[name]
    assert (entry.title, entry.length, entry.classes) == (title, data.length, len(data.classes))


def test_a_set_is_generated_once(small_listops, monkeypatch):
    done = []
    data = load("lra-listops", processes=1, progress=lambda so_far, of: done.append((so_far, of)))
    assert done == [(7, 7)] and (data.title, len(data.documents), data.documents.bits) == ("ListOps", 7, 4)
    monkeypatch.setattr(Generator, "prepare", None)
    assert load("lra-listops").hash == data.hash


SMALL = {"listops": {"sizes": (2, 1, 1)}, "pathfinder": {"images": 10}}


@pytest.mark.parametrize("name", [name for name, entry in known().items() if entry.generated])
def test_the_hash_of_a_generators_settings_is_known_before_it_runs(name):
    made = known()[name].made
    assert isinstance(made, Generator)
    small = replace(made, settings={**made.settings, **SMALL[made.name]})
    data = small.prepare(processes=1)
    assert data.source_hash == small.digest() != made.digest()
    entry = known()[name]
    assert (data.name, data.title, data.length) == (entry.name, entry.title, entry.length)
    assert len(data.classes) == entry.classes


def test_another_version_of_a_generator_generates_anew(small_listops, monkeypatch, caplog):
    load("lra-listops", processes=1)
    monkeypatch.setattr(listops, "VERSION", 99)
    with caplog.at_level(logging.WARNING):
        load("lra-listops", processes=1)
    assert "lra-listops was prepared by another version of its generator; preparing it anew" in caplog.text


def test_a_second_load_reads_nothing(tmp_path, monkeypatch):
    first = read("lra-text", imdb(tmp_path / "raw"))
    monkeypatch.setattr(raw.RawFiles, "members", None)
    monkeypatch.setattr(raw.RawFiles, "digest", None)  # the time and size of the archive are enough
    second = read("lra-text", tmp_path / "raw")
    assert (second.hash, second.origin, second.notes) == (first.hash, first.origin, first.notes)


def test_a_prepared_set_needs_no_raw_files(tmp_path):
    before = read("lra-text", imdb(tmp_path / "raw")).hash
    (tmp_path / "raw").rename(tmp_path / "gone")
    assert read("lra-text").hash == before


def test_changed_raw_files_are_read_anew_with_a_message_and_touched_ones_are_not(tmp_path, caplog, monkeypatch):
    before = read("lra-text", imdb(tmp_path / "raw")).hash
    archive = tmp_path / "raw" / "aclImdb_v1.tar.gz"
    os.utime(archive, (0, 0))
    with monkeypatch.context() as patch:
        patch.setattr(raw.RawFiles, "members", None)
        assert read("lra-text", tmp_path / "raw").hash == before
    imdb(tmp_path / "raw", reviews=REVIEWS | {"aclImdb/test/pos/0_10.txt": b"No?!"})
    with caplog.at_level(logging.WARNING):
        after = read("lra-text", tmp_path / "raw")
    assert after.hash != before and "was prepared from other files than" in caplog.text
    assert read("lra-text").hash == after.hash


def damage(folder: Path) -> None:
    (folder / "tokens.npy").write_bytes(b"no")


def test_a_damaged_set_is_made_anew_with_a_message_and_without_raw_files_an_error(tmp_path, cache, caplog):
    before = read("lra-text", imdb(tmp_path / "raw")).hash
    damage(store.set_folder("lra-text", cache))
    with pytest.raises(
        DataNotFoundError, match=r"tokens\.npy is damaged.*not to be had.*aclImdb_v1\.tar\.gz.*--data-dir"
    ):
        read("lra-text")
    with caplog.at_level(logging.WARNING):
        assert read("lra-text", tmp_path / "raw").hash == before
    assert "preparing it anew" in caplog.text


def test_other_sizes_than_the_published_are_an_error_also_where_they_are_kept(tmp_path):
    imdb(tmp_path / "raw")
    for _ in range(2):
        with pytest.raises(DataMismatchError, match=r"it has 3 \+ 2 \+ 2 cases, published are 25000 \+ 25000 \+ 25000"):
            load("lra-text", tmp_path / "raw")
        read("lra-text", tmp_path / "raw")


def test_rebuild_reads_again(tmp_path, monkeypatch):
    read("lra-text", imdb(tmp_path / "raw"))
    monkeypatch.setattr(raw.RawFiles, "members", lambda self: iter(()))
    read("lra-text", tmp_path / "raw")
    with pytest.raises(ValueError, match="there are no reviews"):
        read("lra-text", tmp_path / "raw", rebuild=True)


def test_what_is_nowhere_is_an_error_that_says_where_to_get_it(tmp_path):
    with pytest.raises(
        DataNotFoundError, match=r"no data directory is given that holds cifar.*; get cifar-10-py.*kriz"
    ):
        load("lra-image")
    with pytest.raises(
        DataNotFoundError, match=rf"neither {tmp_path} nor a folder of it holds aclImdb or .*--data-dir"
    ):
        load("lra-text", tmp_path)
    with pytest.raises(
        DataNotFoundError, match=r"there is no set of long sequences lra-txt; did you mean 'lra-text'\?"
    ):
        load("lra-txt")


def test_a_killed_preparation_leaves_no_set(tmp_path, cache):
    imdb(tmp_path / "raw")
    script = f"""if True:
        import os, signal
        import numpy as np
        from primaldual.data.sequences import load
        save, saved = np.save, []
        def killed(*given):
            save(*given)
            os.kill(os.getpid(), signal.SIGKILL)
        np.save = killed
        load("lra-text", {str(tmp_path / "raw")!r}, check=False)
    """
    assert subprocess.run([sys.executable, "-c", script]).returncode == -signal.SIGKILL
    assert store.stored_names(cache) == [] and list((cache / "sequences").iterdir())
    with pytest.raises(DataNotFoundError, match="lra-text is not prepared"):
        read("lra-text")
    read("lra-text", tmp_path / "raw")
    assert loading.problems("lra-text", None, cache)[1] == [
        "it has 3 + 2 + 2 cases, published are 25000 + 25000 + 25000"
    ]
    assert isinstance(read("lra-text"), SequenceSet)
