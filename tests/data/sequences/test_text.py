"""Reviews are read byte by byte, in one order, from every form of the archive; a broken one is named."""

import re

import pytest

from data.sequences.files import REVIEWS, imdb
from primaldual.data import DataFormatError
from primaldual.data.sequences import SequenceSet
from primaldual.data.sequences.text import IMDB


def read(directory) -> SequenceSet:
    raw = IMDB.find(directory)
    assert raw is not None
    return raw.prepare()


def reviews(data: SequenceSet, part: str) -> list[bytes]:
    return [bytes((data.documents[i] - 1).tolist()) for i in data.parts[part].documents.tolist()]


@pytest.mark.parametrize("form", ["tar.gz", "tar.xz", "tar", "folder"])
def test_reviews_are_the_bytes_of_their_files_in_the_order_of_label_and_number(tmp_path, form):
    data = read(imdb(tmp_path, form))
    expected = [f"aclImdb/train/{name}.txt" for name in ("neg/0_3", "pos/2_7", "pos/10_9")]
    assert reviews(data, "train") == [REVIEWS[path][:4000] for path in expected]
    assert data.parts["train"].labels.tolist() == [0, 1, 1] and data.classes == ("negative", "positive")
    assert reviews(data, "test") == [b"No.", b"Yes."]
    assert (len(data.documents), data.length, data.vocabulary, data.documents.shift) == (5, 4096, 257, 1)


def test_the_set_is_the_same_whatever_the_form_and_the_order_of_the_archive(tmp_path):
    backwards = dict(reversed(REVIEWS.items()))
    forms = [imdb(tmp_path / form, form) for form in ("tar.gz", "folder")] + [imdb(tmp_path / "b", "tar", backwards)]
    assert len({read(directory).hash for directory in forms}) == 1


def test_validation_is_the_test_part_and_kept_once(tmp_path):
    data = read(imdb(tmp_path))
    assert data.parts["validation"] is data.parts["test"] and list(data.parts) == ["train", "validation", "test"]


@pytest.mark.parametrize("form", ["tar.gz", "tar.xz", "tar"])
def test_a_truncated_archive_is_named_with_where_to_get_it(tmp_path, form):
    path = imdb(tmp_path, form) / f"aclImdb_v1.{form}"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 if form != "tar" else 1800])
    with pytest.raises(
        DataFormatError, match=rf"{re.escape(str(path))}: not a whole archive .*get aclImdb_v1\.tar\.gz"
    ):
        read(tmp_path)


@pytest.mark.parametrize("form", ["tar.gz", "tar.xz"])
def test_a_flipped_bit_is_found_by_the_sum_of_the_compressed_file(tmp_path, form):
    path = imdb(tmp_path, form) / f"aclImdb_v1.{form}"
    content = bytearray(path.read_bytes())
    content[-8 if form == "tar.gz" else -20] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataFormatError, match="not a whole archive"):
        read(tmp_path)


def test_something_else_of_that_name_is_an_error(tmp_path):
    (tmp_path / "aclImdb_v1.tar.gz").write_bytes(b"<html>404</html>")
    with pytest.raises(DataFormatError, match="not a whole archive"):
        read(tmp_path)
    imdb(tmp_path / "half", reviews={path: text for path, text in REVIEWS.items() if "test" not in path})
    with pytest.raises(DataFormatError, match=r"there are no reviews such as test/pos/0_9\.txt inside"):
        read(tmp_path / "half")


def test_an_empty_review_is_an_error_that_names_it(tmp_path):
    imdb(tmp_path, "folder", REVIEWS | {"aclImdb/test/pos/7_8.txt": b""})
    with pytest.raises(DataFormatError, match=r"aclImdb/test/pos/7_8\.txt: the review is empty"):
        read(tmp_path)
