"""Pictures are read from pickles that cannot run code, made grey as TensorFlow does, and cut as the benchmark does."""

import os
import pickle

import numpy as np
import pytest

from data.sequences.files import batch, cifar, python2
from primaldual.data import DataFormatError
from primaldual.data.sequences import SequenceSet
from primaldual.data.sequences.image import CIFAR, grey
from primaldual.data.sequences.pickles import PickleError, arrays_only


def read(directory) -> SequenceSet:
    raw = CIFAR.find(directory)
    assert raw is not None
    return raw.prepare()


@pytest.mark.parametrize("form", ["tar.gz", "tar.xz", "folder"])
def test_parts_are_the_first_nine_tenths_of_the_batches_the_rest_and_the_test_batch(tmp_path, form):
    data = read(cifar(tmp_path, form))
    assert {part: len(cases) for part, cases in data.parts.items()} == {"train": 18, "validation": 2, "test": 4}
    numbers = [number for part in data.parts.values() for number in part.documents.tolist()]
    assert numbers == list(range(24))
    assert [label for part in data.parts.values() for label in part.labels.tolist()] == [i % 10 for i in range(24)]
    for number in numbers:
        value = int(511 * (2989 + 2 * 5870 + 3 * 1140) * number / 5_100_000)
        assert data.documents[number].tolist() == [value] * 1024
    assert (data.length, data.vocabulary, data.documents.shift, data.classes[6]) == (1024, 256, 0, "frog")


def test_pixels_follow_one_another_row_by_row(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 3, 32, 32), dtype=np.uint8)
    data = read(cifar(tmp_path, test_batch=batch(0) | {b"data": pixels.reshape(4, -1)}))
    first = int(data.parts["test"].documents[0])
    row_by_row = grey(pixels[0].transpose(1, 2, 0).reshape(1024, 3, 1).repeat(1024, axis=2).reshape(1024, -1))[:, 0]
    assert data.documents[first].tolist() == row_by_row.tolist()


def test_grey_is_what_tensorflow_computes_in_single_precision():
    colours = np.random.default_rng(0).integers(0, 256, (20_000, 3), dtype=np.uint8)
    single = (colours * np.float32(1 / 255)) @ np.array([0.2989, 0.5870, 0.1140], np.float32)
    theirs = (single * np.float32(255.5)).astype(np.uint8)
    mine = grey(colours[:, :, None].repeat(1024, axis=2).reshape(len(colours), -1))[:, 0]
    assert abs(mine.astype(int) - theirs.astype(int)).max() <= 1 and (mine != theirs).mean() < 1e-3


@pytest.mark.parametrize("protocol", [2, 4])
def test_batches_that_python_3_has_pickled_are_the_same(tmp_path, protocol):
    modern = {f"data_batch_{i}": pickle.dumps(batch(4 * (i - 1)), protocol) for i in range(1, 6)}
    modern["test_batch"] = pickle.dumps(batch(20), protocol)
    assert read(cifar(tmp_path / "new", **modern)).hash == read(cifar(tmp_path / "old")).hash


class Harm:
    def __reduce__(self):
        return os.mkdir, ("harm",)


def test_a_pickle_that_would_run_code_is_refused_and_runs_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cifar(tmp_path, data_batch_3=pickle.dumps({b"data": Harm(), b"labels": []}))
    with pytest.raises(DataFormatError, match=r"data_batch_3: it asks for posix\.mkdir, which no array needs"):
        read(tmp_path)
    assert not (tmp_path / "harm").exists()
    with pytest.raises(PickleError, match="encoding 'zip_codec'"):
        arrays_only(b"c_codecs\nencode\n(X\x01\x00\x00\x00aX\x09\x00\x00\x00zip_codectR.")


BROKEN = {
    "cut off": (python2(batch(0))[:-500], "it is no whole pickle"),
    "another thing": (python2([1, 2]), "does not hold data and labels"),
    "of other pictures": (batch(0) | {b"data": np.zeros((4, 100), np.uint8)}, "expected pictures of 3 × 1024 bytes"),
    "a label missing": (batch(0) | {b"labels": [1, 2, 3]}, "a label from 0 to 9 for each of 4 pictures"),
    "a label of ten": (batch(0) | {b"labels": [1, 2, 3, 10]}, "a label from 0 to 9"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_batch_is_named_with_what_is_wrong(tmp_path, name):
    content, message = BROKEN[name]
    with pytest.raises(DataFormatError, match=rf"cifar-10-python\.tar\.gz: .*data_batch_2: .*{message}.*kriz/cifar"):
        read(cifar(tmp_path, data_batch_2=content))


def test_a_missing_batch_is_named(tmp_path):
    cifar(tmp_path, "folder")
    (tmp_path / "cifar-10-batches-py" / "data_batch_5").unlink()
    with pytest.raises(DataFormatError, match=r"cifar-10-batches-py: there is no data_batch_5 inside"):
        read(tmp_path)
