"""A prepared set comes back as it was written, compact and mapped into memory; damage to it is found."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from primaldual.data import CacheError
from primaldual.data.sequences import Cases, SequenceSet, content_hash, side_by_side, store


def small(bits: int = 8, pairs: bool = False) -> SequenceSet:
    """Seven documents, and parts of them of which two are the same."""
    lengths = np.arange(7)
    tokens = np.random.default_rng(0).integers(0, 2**bits, lengths.sum(), dtype=np.uint8)
    documents = side_by_side(tokens, lengths, bits=bits)
    indices = np.array([[0, 6], [3, 1], [6, 6]]) if pairs else np.array([2, 0, 6])
    test = Cases(indices[:2], np.array([1, 0]))
    parts = {"train": Cases(indices, np.array([0, 1, 2])), "validation": test, "test": test}
    return SequenceSet(
        "toy", "Toy", documents, parts, ("a", "b", "c"), 8, 257, ("a note",), "nowhere",
        content_hash(documents, parts), "abc",
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = store.set_folder("toy", tmp_path)
    store.write(small(), folder, "stamp")
    return folder


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_set_comes_back_as_it_was_written(tmp_path, bits, pairs):
    written = small(bits, pairs)
    store.write(written, tmp_path / "toy", "")
    data = store.read(tmp_path / "toy", hashes=True)
    assert content_hash(data.documents, data.parts) == written.hash
    for name in ("name", "title", "classes", "length", "vocabulary", "notes", "origin", "hash", "source_hash"):
        assert getattr(data, name) == getattr(written, name)
    assert data.parts["validation"] is data.parts["test"] and list(data.parts) == list(written.parts)
    assert {array.dtype.name for cases in data.parts.values() for array in (cases.documents, cases.labels)} == {"int64"}


def test_tokens_are_mapped_and_who_writes_into_them_does_not_change_the_file(folder):
    data = store.read(folder)
    assert isinstance(data.documents.raw.base, np.memmap)
    tensor = torch.from_numpy(data.documents.raw)  # a read-only array would warn
    tensor += 1
    assert store.read(folder, hashes=True).documents.raw[0] != data.documents.raw[0]


def test_what_is_on_disk_is_compact(folder):
    kinds = {path.stem: str(np.load(path).dtype) for path in folder.glob("*.npy")}
    names = {
        "tokens",
        "offsets",
        *(f"{part}.{what}" for part in ("train", "validation") for what in ("documents", "labels")),
    }
    assert kinds == dict.fromkeys(names, "uint8")
    large = store._compact(np.array([0, 70_000]))
    assert large.dtype == np.uint32


@pytest.mark.parametrize("name", ["tokens", "offsets", "train.labels"])
def test_a_changed_byte_is_found_by_the_hash_and_a_missing_one_at_once(folder, name):
    path = folder / f"{name}.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CacheError, match=rf"{name}\.npy is damaged: it does not have the hash"):
        store.read(folder, hashes=True)
    path.write_bytes(content[:-1])
    with pytest.raises(
        CacheError, match=rf"{name}\.npy is damaged: it has {len(content) - 1} bytes, not {len(content)}"
    ):
        store.read(folder)
    path.unlink()
    with pytest.raises(CacheError, match=rf"damaged \(FileNotFoundError.*{name}"):
        store.read(folder)


def test_files_that_were_exchanged_along_with_their_hashes_are_found_by_that_of_the_set(folder):
    other = small()
    tokens = other.documents.raw.copy()
    tokens[0] ^= 1
    about = json.loads((folder / store.MANIFEST).read_text())
    store.write(replace(other, documents=replace(other.documents, raw=tokens)), folder, "")
    exchanged = json.loads((folder / store.MANIFEST).read_text())
    (folder / store.MANIFEST).write_text(json.dumps(about | {"files": exchanged["files"]}))
    store.read(folder)
    with pytest.raises(CacheError, match="its contents do not have the hash that was written with them"):
        store.read(folder, hashes=True)


WRONG = {
    "no JSON": ("{", r"damaged \(JSONDecodeError"),
    "no manifest of a set": ("[]", r"damaged \(TypeError"),
    "another version": ({"version": 99}, "was prepared by version 99; this one is 1"),
    "more documents": ({"documents": 8}, "the offsets are not those of its documents"),
    "other tokens": ({"bits": 4}, r"its 21 tokens of 4 bits are not \(21,\) of uint8"),
    "a shorter length": ({"length": 5}, "a document is longer than 5"),
    "fewer classes": ({"classes": ["a", "b"]}, "the train part is of documents or classes that are not there"),
    "a part of another size": (
        {"parts": {"train": {"cases": 4, "arrays": "train"}}},
        "train part does not have 4 cases",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_manifest_that_does_not_fit_is_found(folder, name):
    change, message = WRONG[name]
    path = folder / store.MANIFEST
    about = json.loads(path.read_text())
    path.write_text(change if isinstance(change, str) else json.dumps(about | change))
    with pytest.raises(CacheError, match=message):
        store.read(folder)


def test_a_write_that_fails_leaves_the_earlier_set_and_says_what_to_do(folder, monkeypatch):
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(CacheError, match=r"toy cannot be written \(No space left.*PRIMALDUAL_CACHE"):
        store.write(small(4), folder, "")
    assert store.read(folder, hashes=True).documents.bits == 8 and list(folder.parent.iterdir()) == [folder]


def test_a_set_that_is_replaced_stays_with_who_has_it(folder):
    data = store.read(folder)
    store.write(small(4), folder, "")
    assert content_hash(data.documents, data.parts) == data.hash
    assert store.stored_names(folder.parents[1]) == ["toy"]
