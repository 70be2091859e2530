"""Small raw files in the formats of the originals."""

import io
import pickle
import struct
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

PACKED = {"tar.gz": "w:gz", "tar.xz": "w:xz", "tar": "w"}

REVIEWS = {
    "aclImdb/train/pos/10_9.txt": "Splendid \u2013 ten of ten.".encode(),
    "aclImdb/train/pos/2_7.txt": b"Fine.<br /><br />Really.",
    "aclImdb/train/neg/0_3.txt": b"Dull." + 5000 * b".",
    "aclImdb/test/neg/1_1.txt": b"No.",
    "aclImdb/test/pos/0_10.txt": b"Yes.",
    "aclImdb/train/unsup/0_0.txt": b"without a label",
    "aclImdb/train/labeledBow.feat": b"9 0:9",
    "aclImdb/README": b"Large Movie Review Dataset v1.0",
}


def pack(directory: Path, name: str, form: str, members: Mapping[str, bytes]) -> Path:
    """Files as a tar of some form, called `name`, or in folders; gives the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    if form == "folder":
        for path, content in members.items():
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_bytes(content)
        return directory
    with tarfile.open(directory / f"{name}.{form}", PACKED[form]) as archive:
        for path, content in members.items():
            about = tarfile.TarInfo(path)
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    return directory


def imdb(directory: Path, form: str = "tar.gz", reviews: Mapping[str, bytes] = REVIEWS) -> Path:
    """IMDb of a few reviews."""
    return pack(directory, "aclImdb_v1", form, reviews)


class _Python2(pickle._Pickler):
    """Bytes as Python 2 pickles its strings, truth values as its integers."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def _bytes(self, value: bytes) -> None:
        self.write(b"T" + struct.pack("<i", len(value)) + value)

    def _bool(self, value: bool) -> None:
        self.save(int(value))

    dispatch[bytes], dispatch[bool] = _bytes, _bool


def python2(value: object) -> bytes:
    """As the official batches were pickled, with the arrays of an old numpy."""
    stream = io.BytesIO()
    _Python2(stream, protocol=2).dump(value)
    return stream.getvalue().replace(b"numpy._core.", b"numpy.core.")


def batch(first: int, pictures: int = 4) -> dict[bytes, object]:
    """A batch of CIFAR-10: picture i is of one colour, (i, 2 i, 3 i), and its label is i modulo 10."""
    numbers = np.arange(first, first + pictures, dtype=np.uint8)
    data = np.repeat(np.stack([numbers, 2 * numbers, 3 * numbers], 1), 1024, axis=1)
    return {b"batch_label": b"a batch", b"labels": (numbers % 10).tolist(), b"data": data}


def batches(**changed: object) -> dict[str, bytes]:
    """The members of CIFAR-10, in the order of the official archive."""
    content: dict[str, object] = {f"data_batch_{i}": batch(4 * (i - 1)) for i in (4, 3, 5, 2, 1)}
    content = {"readme.html": b"<html>", **content, "test_batch": batch(20), **changed}
    return {
        f"cifar-10-batches-py/{name}": value if isinstance(value, bytes) else python2(value)
        for name, value in content.items()
    }


def cifar(directory: Path, form: str = "tar.gz", **changed: object) -> Path:
    """CIFAR-10 of 5 × 4 training and 4 test pictures."""
    return pack(directory, "cifar-10-python", form, batches(**changed))


Row = tuple[object, str, str, bytes, bytes]
PAIRS: dict[str, Sequence[Row]] = {
    "train": [
        ("1.0", "P01", "P02", b"first paper", b"second paper"),
        ("0.0", "P02", "P03", b"second paper", "dritter \u2013 Aufsatz".encode()),
    ],
    "eval": [("0.0", "P03", "P01", "dritter \u2013 Aufsatz".encode(), b"first paper")],
    "test": [("1.0", "P04", "P01", b"x" * 5000, b"first paper"), ("0", "P05", "P02", b"x" * 4500, b"second paper")],
}


def pairs(directory: Path, **changed: Sequence[Row]) -> Path:
    """Pairs of documents in the three files of the benchmark's format."""
    directory.mkdir(parents=True, exist_ok=True)
    for part, rows in (PAIRS | changed).items():
        lines = (b"\t".join(one if isinstance(one, bytes) else str(one).encode() for one in row) for row in rows)
        (directory / f"new_aan_pairs.{part}.tsv").write_bytes(b"".join(line + b"\n" for line in lines))
    return directory
