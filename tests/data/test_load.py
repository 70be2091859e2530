"""Sets by name: from a directory, a zip, the aeon package or a download; kept, checked, and made anew when stale."""

import json
import logging
import subprocess
import sys
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save

from data.files import HEADER, ROWS, archive, folder, text
from primaldual.base.cache import cache_directory
from primaldual.base.tensors import read
from primaldual.data import (
    CacheError,
    DataError,
    DataFormatError,
    DataMismatchError,
    DataNotFoundError,
    cache,
    load,
    load_files,
    manifest,
)
from primaldual.data import sources as places


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIMALDUAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PRIMALDUAL_DATA", raising=False)


def cached(tmp_path: Path, name: str = "Toy") -> Path:
    return tmp_path / "cache" / "timeseries" / f"{name}.safetensors"


def test_the_sets_inside_aeon_need_neither_directory_nor_network(monkeypatch):
    pytest.importorskip("aeon")
    monkeypatch.setattr(places, "import_module", None)  # aeon is found, not imported
    data = load("JapaneseVowels")
    assert data.train.x.shape == (270, 26, 12) and data.test.x.shape == (370, 26, 12)
    assert (len(data.classes), data.longest, data.kind) == (9, 29, "classification")
    assert load("BasicMotions").train.padding is None


def test_folder_zip_and_zip_with_a_folder_inside_are_the_same_set(tmp_path):
    hashes = {load("Toy", folder(tmp_path / "a")).hash}
    for inside in ("", "Toy/"):
        (tmp_path / f"b{len(inside)}" / "uea").mkdir(parents=True)
        directory = archive(tmp_path / f"b{len(inside)}" / "uea", inside=inside).parent.parent
        hashes.add(load("Toy", directory).hash)
    assert len(hashes) == 1


def test_a_second_load_parses_nothing(tmp_path, monkeypatch):
    directory = folder(tmp_path / "raw")
    first = load("Toy", directory)
    monkeypatch.setattr(places, "read_ts", None)
    second = load("Toy", directory)
    assert (second.hash, second.source_hash, second.notes) == (first.hash, first.source_hash, first.notes)
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num())
        for (_, a), (_, b) in zip(first.tensors(), second.tensors(), strict=True)
    )


def test_a_prepared_set_needs_no_raw_files(tmp_path):
    directory = folder(tmp_path / "raw")
    before = load("Toy", directory).hash
    directory.rename(tmp_path / "gone")
    assert load("Toy").hash == before


def test_a_prepared_set_is_read_without_aeon_pandas_or_the_command_line(tmp_path):
    load("Toy", folder(tmp_path / "raw"))
    script = """
import sys
for name in ("aeon", "pandas", "typer", "sklearn"):
    sys.modules[name] = None
from primaldual.data import load
print(load("Toy", offline=True).train.x.shape)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "torch.Size([3, 3, 2])", done.stderr


def test_changed_raw_files_are_prepared_anew_with_a_message(tmp_path, caplog):
    directory = folder(tmp_path / "raw")
    before = load("Toy", directory).hash
    folder(directory, train=text(*ROWS, "9,9,9:9,9,9:b"))
    with caplog.at_level(logging.WARNING):
        after = load("Toy", directory)
    assert len(after.train) == 4 and after.hash != before
    assert "was prepared from other files" in caplog.text and load("Toy").hash == after.hash


@pytest.mark.parametrize("damage", ["truncated", "flipped", "version"])
def test_a_damaged_cache_is_made_anew_with_a_message(tmp_path, caplog, monkeypatch, damage):
    directory = folder(tmp_path / "raw")
    before, path = load("Toy", directory).hash, cached(tmp_path)
    content = bytearray(path.read_bytes())
    if damage == "truncated":
        path.write_bytes(content[:-7])
    elif damage == "flipped":
        content[-1] ^= 1
        path.write_bytes(content)
    else:
        monkeypatch.setattr(cache, "PARSER_VERSION", 99)
    with caplog.at_level(logging.WARNING):
        assert load("Toy", directory).hash == before
    assert "preparing it anew" in caplog.text


def test_a_damaged_cache_without_raw_files_is_an_error(tmp_path):
    load("Toy", folder(tmp_path / "raw"))
    cached(tmp_path).write_bytes(b"no")
    with pytest.raises(DataNotFoundError, match=r"damaged.*--data-dir"):
        load("Toy", offline=True)


@pytest.mark.parametrize("error", [OSError, SafetensorError])
def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, error, caplog):
    directory = folder(tmp_path / "raw")
    before = load("Toy", directory)

    def fail(*_, **__):
        raise error("disk full")

    monkeypatch.setattr("primaldual.base.tensors.save", fail)
    with pytest.raises(CacheError, match=r"Toy\.safetensors cannot be written \(disk full\).*PRIMALDUAL_CACHE"):
        load("Toy", directory, rebuild=True, must_keep=True)
    with caplog.at_level(logging.WARNING):  # the data are here all the same
        assert load("Toy", directory, rebuild=True).hash == before.hash
    assert "disk full" in caplog.text and "Toy is not kept" in caplog.text
    assert [p.name for p in cached(tmp_path).parent.iterdir()] == ["Toy.safetensors"]
    assert load("Toy").hash == before.hash


def test_a_prepared_set_can_be_read_by_others(tmp_path):
    load("Toy", folder(tmp_path / "raw"))
    assert cached(tmp_path).stat().st_mode & 0o777 == 0o644


def test_an_error_in_a_zip_names_the_zip_the_member_and_the_line(tmp_path):
    archive(tmp_path, test=text(ROWS[0], "1,2,3:4,oops,6:b"))
    line = HEADER.count("\n") + 2
    with pytest.raises(DataFormatError, match=rf"Toy\.zip:Toy_TEST\.ts, line {line}: channel 2, step 2: 'oops'"):
        load("Toy", tmp_path)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_a_damaged_zip_is_an_error_that_names_it(tmp_path, damage):
    rows = [f"{i},{i * i},{i % 7}:{i},{i},{i}:A" for i in range(500)]
    path = archive(tmp_path, train=text(*rows))
    content = bytearray(path.read_bytes())
    content[200:210] = b"0123456789"
    path.write_bytes({"truncated": path.read_bytes()[:-100], "flipped": content, "empty": b""}[damage])
    with pytest.raises(DataFormatError, match=r"Toy\.zip.*"):
        load("Toy", tmp_path)


@pytest.mark.parametrize("packing", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA, zipfile.ZIP_DEFLATED])
def test_a_damaged_zip_of_any_packing_is_an_error_that_names_it(tmp_path, packing):
    with zipfile.ZipFile(tmp_path / "Toy.zip", "w", packing) as stream:
        stream.writestr("Toy_TRAIN.ts", text(*ROWS * 50))
    raw = (tmp_path / "Toy.zip").read_bytes()
    for place in range(0, len(raw), 3):
        (tmp_path / "Toy.zip").write_bytes(raw[:place] + bytes([raw[place] ^ 0x81]) + raw[place + 1 :])
        with suppress(DataFormatError):  # what is not of the series may be damaged
            places._read_zip(tmp_path / "Toy.zip", "Toy_TRAIN.ts")


def test_an_encrypted_zip_is_an_error_that_says_so(tmp_path):
    path = archive(tmp_path)
    raw = bytearray(path.read_bytes())
    for start in (raw.index(b"PK\1\2") + 8, 6):
        raw[start] |= 1
    path.write_bytes(raw)
    with pytest.raises(DataFormatError, match=r"Toy_TRAIN\.ts is encrypted; pack it without a password"):
        load("Toy", tmp_path)


def test_a_zip_that_would_fill_the_memory_is_refused_before_it_is_unpacked(tmp_path):
    path = archive(tmp_path, train=text("1," * 10_000_000 + "1:1:a"))
    assert path.stat().st_size < 60_000
    with pytest.raises(DataFormatError, match="unpack to 20,000,"):
        load("Toy", tmp_path)


def test_series_that_would_be_little_but_padding_are_refused(tmp_path):
    rows = ["1:1:a", *["1:2:b"] * 100_000, f"{'1,' * 2000}1:{'1,' * 2000}1:a"]
    with pytest.raises(DataError, match="would be padded to 2,001 steps each"):
        load("Toy", folder(tmp_path, train=text(*rows, equal=False)))


def test_a_cache_file_under_another_name_is_refused(tmp_path):
    load("Toy", folder(tmp_path / "raw"))
    cached(tmp_path).rename(cached(tmp_path, "Other"))
    with pytest.raises(CacheError, match=r"Other\.safetensors holds Toy: it was renamed"):
        cache.read(cached(tmp_path, "Other"))


def test_a_cache_from_before_there_were_checksums_is_read(tmp_path):
    data, path = load("Toy", folder(tmp_path / "raw")), cached(tmp_path)
    tensors, about = read(path)
    path.write_bytes(save(tensors, metadata={"primaldual": json.dumps(about)}))
    assert cache.read(path).hash == data.hash


def test_a_half_set_and_a_foreign_zip_are_errors(tmp_path):
    folder(tmp_path / "half")
    (tmp_path / "half" / "Toy" / "Toy_TEST.ts").unlink()
    with pytest.raises(DataNotFoundError, match=r"Toy_TEST\.ts is missing"):
        load("Toy", tmp_path / "half")
    archive(tmp_path, "Other").rename(tmp_path / "Toy.zip")
    with pytest.raises(DataFormatError, match=r"no Toy_TRAIN\.ts inside"):
        load("Toy", tmp_path)


def test_a_test_file_of_other_channels_is_an_error(tmp_path):
    other = text("1,2,3:a", header=HEADER.replace("@dimensions 2", "@dimensions 1"))
    with pytest.raises(DataFormatError, match=r"Toy_TEST\.ts: .* 2 channels, the test file classification with 1"):
        load("Toy", folder(tmp_path, test=other))


def libras(cases: int, classes: str = "@classLabel true " + " ".join(map(str, range(1, 16)))) -> str:
    """A file of the published size of Libras."""
    header = f"@univariate false\n@dimensions 2\n@seriesLength 45\n{classes}\n@data\n"
    steps = ",".join(map(str, range(45)))
    return header + "\n".join(f"{steps}:{steps}:{i % 15 + 1}" for i in range(cases)) + "\n"


def test_a_file_cut_at_a_line_is_found_by_the_published_size(tmp_path):
    directory = folder(tmp_path, "Libras", libras(180), libras(179))
    with pytest.raises(DataMismatchError, match=r"it has 180 \+ 179 cases, the archive's 180 \+ 180"):
        load("Libras", directory)
    assert len(load("Libras", directory, check=False).test) == 179


def test_a_wrong_header_is_forgiven_where_the_published_size_confirms_the_series(tmp_path):
    wrong = "@classLabel true 1 2"
    assert load("Libras", folder(tmp_path / "a", "Libras", libras(180, wrong), libras(180))).channels == 2
    with pytest.raises(DataFormatError, match="class '3' is not one of those"):
        load("Libros", folder(tmp_path / "b", "Libros", libras(180, wrong), libras(180)))


def test_the_manifest_holds_the_papers_sets():
    kinds = [entry.kind for entry in manifest().values()]
    assert (kinds.count("classification"), kinds.count("regression")) == (25, 6)


def test_a_set_that_is_nowhere_is_an_error_that_says_where_it_was_sought(tmp_path):
    with pytest.raises(DataNotFoundError, match=rf"JapaneseVowel in {tmp_path} .* did you mean 'JapaneseVowels'"):
        load("JapaneseVowel", tmp_path, offline=True)
    with pytest.raises(DataNotFoundError, match="does not exist"):
        load("Toy", tmp_path / "nowhere")
    with pytest.raises(
        DataNotFoundError, match=r"lra-text is no set of time series; primaldual\.data\.sequences\.load"
    ):
        load("lra-text", offline=True)
    with pytest.raises(DataError, match="letters, digits"):
        load("../Toy")
    with pytest.raises(DataError, match="give NATOPS and the data directory uea"):
        load("uea/NATOPS.zip")


def test_a_download_is_kept_and_a_broken_one_leaves_nothing(tmp_path, monkeypatch):
    datasets = pytest.importorskip("aeon.datasets")

    def broken(name, split, extract_path):
        folder(Path(extract_path), name)
        raise ValueError("no network")

    monkeypatch.setattr(datasets, "load_classification", broken)
    with pytest.raises(DataNotFoundError, match=r"Libras could not be downloaded: no network.*Libras\.zip"):
        load("Libras")
    assert list((tmp_path / "cache" / "downloads").iterdir()) == []

    monkeypatch.setattr(
        datasets,
        "load_classification",
        lambda name, split, extract_path: folder(Path(extract_path), name, libras(180), libras(180)),
    )
    assert len(load("Libras").train) == 180
    monkeypatch.setattr(datasets, "load_classification", broken)
    assert len(load("Libras", rebuild=True).train) == 180
    with pytest.raises(DataNotFoundError):
        load("Heartbeat", offline=True)


def test_your_own_files_need_no_name(tmp_path):
    directory = folder(tmp_path) / "Toy"
    data = load_files(directory / "Toy_TRAIN.ts")
    assert (data.name, len(data.train), len(data.test)) == ("Toy", 3, 3)
    alone = (directory / "Toy_TRAIN.ts").rename(directory / "mine.ts")
    assert (load_files(alone).name, len(load_files(alone).test)) == ("mine", 0)
    with pytest.raises(DataFormatError, match=r"mine\.ts, line 6"):
        alone.write_text(text().replace("@dimensions 2", "@dimensions 3"))
        load_files(alone)
    with pytest.raises(DataNotFoundError, match="there is no file"):
        load_files(directory / "none.ts")


def test_the_user_cache_is_where_the_platform_keeps_it(monkeypatch):
    monkeypatch.delenv("PRIMALDUAL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_directory(None) == Path("/x/primaldual")
    assert cache_directory("/y") == Path("/y")
