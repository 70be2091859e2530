"""Text becomes tokens once, nothing of it is lost, and what is wrong is said by name."""

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest

from data.sequences.files import imdb
from primaldual.data import DataError, DataNotFoundError
from primaldual.data.text import Bytes, TextSet, load, store

LICENSE = Path(__file__).parents[3] / "LICENSE"
REVIEWS = {
    f"aclImdb/{part}/{label}/{i}_{stars}.txt": f"{part} {label} {i} – a review".encode()
    for part in ("train", "test")
    for label, stars in (("pos", 9), ("neg", 2))
    for i in range(20)
} | {"aclImdb/train/unsup/0_0.txt": b"without a label", "aclImdb/README": b"about"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRIMALDUAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PRIMALDUAL_DATA", raising=False)
    return tmp_path / "cache" / "text"


def texts(data: TextSet, part: str) -> list[bytes]:
    """The documents of a part, which begins and ends with a separator."""
    first, *found, last = bytes(data.of(part).astype(np.uint8)).split(b"\0")
    assert first == last == b"" and len(found) == data.parts[part].documents
    return found


def folder_of(path: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


@pytest.mark.parametrize("form", ["tar.gz", "tar.xz", "folder"])
def test_imdb_is_divided_by_document_and_its_test_folder_is_the_test(tmp_path, form):
    data = load("text-imdb", imdb(tmp_path / "raw", form, REVIEWS), check=False)
    found = {part: texts(data, part) for part in data.parts}
    assert [len(one) for one in found.values()] == [38, 2, 40]
    for part, names in {"train": ("train", "validation"), "test": ("test",)}.items():
        read = sorted(text for name in names for text in found[name])
        assert read == sorted(x for name, x in REVIEWS.items() if f"/{part}/" in name and "unsup" not in name)
    assert found["train"] != sorted(found["train"])
    assert all(one.bytes == data.of(part).size - 1 for part, one in data.parts.items())


def test_the_same_reviews_are_the_same_set_wherever_they_come_from(tmp_path):
    hashes = set()
    for form in ("tar.gz", "folder"):
        raw = imdb(tmp_path / form, form, REVIEWS)
        hashes.add(load("text-imdb", raw, check=False).hash)
        hashes.add(load("text-imdb", check=False).hash)  # from the cache
    hashes.add(load(tmp_path / "tar.gz" / "aclImdb_v1.tar.gz", check=False).hash)
    assert len(hashes) == 1


def test_a_file_is_cut_at_its_end_between_characters(tmp_path):
    content = ("äöü–" * 500).encode()
    path = tmp_path / "one.txt"
    path.write_bytes(content)
    data = load(path)
    found = [texts(data, part)[0] for part in ("train", "validation", "test")]
    assert b"".join(found) == content and [len(one.decode()) for one in found] == [1800, 100, 100]
    assert data.name == "one" and data.tokenizer == "bytes"


def test_a_folder_is_divided_by_document_or_as_it_is_divided_already(tmp_path):
    many = {f"a/{i}.txt": f"text {i}".encode() for i in range(60)} | {"a/x.png": b"\0", ".git/x.txt": b"hidden"}
    data = load(folder_of(tmp_path / "many", many))
    assert [one.documents for one in data.parts.values()] == [54, 3, 3]
    assert sorted(text for part in data.parts for text in texts(data, part)) == sorted(list(many.values())[:60])
    own = {f"{part}/{i}.md": f"{part} {i}".encode() for part in ("train", "validation", "test") for i in range(3)}
    data = load(folder_of(tmp_path / "own", own))
    assert all(text.startswith(part.encode()) for part in data.parts for text in texts(data, part))


def test_it_is_read_once_and_anew_where_the_text_has_changed(tmp_path, cache, monkeypatch, caplog):
    path = folder_of(tmp_path, {"x.txt": b"some text " * 50}) / "x.txt"
    first = load(path)
    with monkeypatch.context() as patch:
        patch.setattr(Bytes, "encode", None)
        again = load(path)
    assert again.hash == first.hash and isinstance(again.tokens.base, np.memmap)
    path.write_bytes(b"other text " * 50)
    with caplog.at_level(logging.WARNING):
        assert load(path).hash != first.hash
    assert "was prepared from other text than" in caplog.text
    (tokens,) = cache.glob("*/tokens.bin")
    tokens.write_bytes(tokens.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        load(path)
    assert "tokens.bin is damaged: it has" in caplog.text


def test_every_byte_of_what_is_kept_can_be_checked(tmp_path, cache):
    load(LICENSE)
    (folder,) = cache.iterdir()
    assert store.read(folder, hashes=True).hash == store.read(folder).hash
    content = bytearray((folder / "tokens.bin").read_bytes())
    content[7] ^= 1
    (folder / "tokens.bin").write_bytes(content)
    with pytest.raises(DataError, match="does not have the hash"):
        store.read(folder, hashes=True)
    about = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(about | {"version": 99}))
    with pytest.raises(DataError, match="prepared by version 99"):
        store.read(folder)
    parts = about["parts"] | {"test": about["parts"]["test"] | {"start": 0}}
    (folder / "manifest.json").write_text(json.dumps(about | {"parts": parts}))
    with pytest.raises(DataError, match="is damaged: its test part cannot be"):
        store.read(folder)


def test_nothing_is_left_of_a_text_that_cannot_be_read(tmp_path, cache):
    with pytest.raises(DataError, match=r"bad\.txt: there is a byte 0 in it, so this is no text"):
        load(folder_of(tmp_path / "bad", {"a.txt": b"good", "bad.txt": b"text \0"}) / "bad.txt")
    assert not [path for path in cache.rglob("*") if path.is_file()]


def damaged(tmp_path: Path) -> Path:
    raw = imdb(tmp_path / "raw", "tar.gz", REVIEWS)
    archive = raw / "aclImdb_v1.tar.gz"
    archive.write_bytes(archive.read_bytes()[:-200])
    return raw


@pytest.mark.parametrize(
    ("what", "make", "message"),
    [
        ("text-imdb", lambda tmp: None, "no data directory is given that holds aclImdb .*; get aclImdb_v1.tar.gz"),
        ("text-imdb", lambda tmp: tmp, "neither .* nor a folder of it holds .*ai.stanford.edu"),
        ("text-imdb", damaged, r"aclImdb_v1.tar.gz: not a whole archive .*; get aclImdb_v1.tar.gz from https"),
        ("text-imdb", lambda tmp: imdb(tmp, reviews={"aclImdb/train/pos/1_9.txt": b"x"}), "no reviews such as test"),
        ("text-imdb", lambda tmp: imdb(tmp, reviews=REVIEWS), r"38 \+ 2 \+ 40 documents, published are 23750 \+ 1250"),
        ("text-imbd", lambda tmp: None, "there is no text text-imbd.*did you mean 'text-imdb'"),
    ],
    ids=["no directory", "not in it", "truncated", "no test", "too few", "misspelt"],
)  # fmt: skip
def test_what_is_missing_or_damaged_is_said_with_where_to_get_it(tmp_path, what, make, message):
    with pytest.raises(DataError, match=message):
        load(what, make(tmp_path))


def test_what_is_no_text_is_refused_by_name(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataNotFoundError, match=r"empty has no text in it: no file with a name in \.txt"):
        load(tmp_path / "empty")
    (tmp_path / "x.zip").write_bytes(b"PK")
    with pytest.raises(DataNotFoundError, match=r"x\.zip is an archive: unpack it"):
        load(tmp_path / "x.zip")
    (tmp_path / "x.txt").write_bytes(b"")
    with pytest.raises(DataError, match=r"x\.txt: there is no text for the train part"):
        load(tmp_path / "x.txt")


def test_words_of_a_tokenizer_are_counted_in_bytes_all_the_same(tmp_path):
    library = pytest.importorskip("tokenizers")
    words = LICENSE.read_text().split()
    made = library.Tokenizer(
        library.models.WordLevel({word: i for i, word in enumerate(dict.fromkeys(words))}, words[0])
    )
    made.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    made.save(str(tmp_path / "words.json"))
    data, plain = load(LICENSE, tokenizer=tmp_path / "words.json"), load(LICENSE)
    assert data.name.startswith("LICENSE-words-") and data.tokens.dtype == np.int32 and data.hash != plain.hash
    assert {part: one.bytes for part, one in data.parts.items()} == {p: one.bytes for p, one in plain.parts.items()}
    names = {i: word for word, i in made.get_vocab().items()}
    assert [names[i] for i in data.of("train")[1:-1].tolist()] == texts(plain, "train")[0].decode().split()
    assert set(data.of("train")[[0, -1]]) == {data.separator} == {data.vocabulary - 1}
    (tmp_path / "latin.txt").write_bytes("schön ".encode("latin1") * 100)
    with pytest.raises(DataError, match=r"latin\.txt: it is not UTF-8 .*0xf6 in position 3"):
        load(tmp_path / "latin.txt", tokenizer=tmp_path / "words.json")
    shutil.rmtree(tmp_path / "cache")


def test_a_tokenizer_that_is_not_there_is_an_error_that_says_what_to_give(tmp_path):
    with pytest.raises(DataNotFoundError, match=r"no file .*none\.json; give the tokenizer\.json"):
        load(LICENSE, tokenizer=tmp_path / "none.json")
