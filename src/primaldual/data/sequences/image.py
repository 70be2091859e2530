"""Image: the pictures of CIFAR-10 in grey, pixel by pixel, row after row.

Grey is TensorFlow's `rgb_to_grayscale` of 8-bit pictures, which the benchmark is made with: luma with the weights of
ITU-R BT.601, rounded to four digits, and 1/2 added in units of the largest value instead of rounding,

    ⌊(255.5 / 255) (0.2989 R + 0.5870 G + 0.1140 B)⌋.

It is computed in whole numbers, so that all machines agree. TensorFlow does it in single precision and gives another
value, one lower or higher, to some 240 of the 2²⁴ colours.
"""

from __future__ import annotations

import re

import numpy as np

from .documents import Cases, SequenceSet, side_by_side
from .pickles import PickleError, arrays_only
from .raw import Format, RawFiles

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PIXELS = 32 * 32

_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
_BATCH = re.compile(r"(?:^|/)(data_batch_[1-5]|test_batch)$")


def read(raw: RawFiles) -> SequenceSet:
    """The first 90 % of the training pictures in the order of the batches, the last 10 %, and the test pictures."""
    batches = {path.rpartition("/")[2]: _batch(raw, path, content) for path, content in raw.members()}
    for batch in (*_BATCHES, "test_batch"):
        if batch not in batches:
            raise raw.broken(raw.origin, f"there is no {batch} inside")
    pictures, labels = (np.concatenate(both) for both in zip(*(batches[batch] for batch in _BATCHES), strict=True))
    test_pictures, test_labels = batches["test_batch"]
    first, all_of_them = len(pictures) * 9 // 10, np.arange(len(pictures) + len(test_pictures))
    parts = {
        "train": Cases(all_of_them[:first], labels[:first]),
        "validation": Cases(all_of_them[first : len(pictures)], labels[first:]),
        "test": Cases(all_of_them[len(pictures) :], test_labels),
    }
    tokens = np.concatenate([pictures, test_pictures]).reshape(-1)
    documents = side_by_side(tokens, np.full(len(all_of_them), PIXELS), shift=0)
    return SequenceSet("lra-image", "Image", documents, parts, CLASSES, PIXELS, 256)


def grey(pixels: np.ndarray) -> np.ndarray:
    """[pictures, 1024] of [pictures, 3072]: all of red, all of green, all of blue.

    >>> grey(np.repeat(np.array([[255, 0, 0], [9, 9, 9], [255, 255, 255]], np.uint8), 1024, axis=1))[:, 0].tolist()
    [76, 9, 255]
    """
    red, green, blue = np.moveaxis(pixels.reshape(len(pixels), 3, -1).astype(np.uint32), 1, 0)
    return ((2989 * red + 5870 * green + 1140 * blue) * 511 // 5_100_000).astype(np.uint8)


def _batch(raw: RawFiles, path: str, content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Grey pictures and labels of a file."""
    what = f"{raw.origin}: {path}"
    try:
        batch = arrays_only(content)
    except PickleError as error:
        raise raw.broken(what, str(error)) from None
    keys = {key.decode() if isinstance(key, bytes) else key: key for key in batch} if isinstance(batch, dict) else {}
    if not {"data", "labels"} <= keys.keys():
        raise raw.broken(what, "it does not hold data and labels, as a batch of CIFAR-10 does")
    pixels, labels = np.asarray(batch[keys["data"]]), batch[keys["labels"]]
    if pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != 3 * PIXELS or not len(pixels):
        raise raw.broken(what, f"expected pictures of 3 × 1024 bytes, got {pixels.dtype} of shape {pixels.shape}")
    fine = isinstance(labels, list) and all(isinstance(one, int) and 0 <= one < len(CLASSES) for one in labels)
    if not fine or len(labels) != len(pixels):
        raise raw.broken(what, f"expected a label from 0 to 9 for each of {len(pixels)} pictures")
    return grey(pixels), np.array(labels, dtype=np.int64)


CIFAR = Format(
    read=read,
    get="get cifar-10-python.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html",
    any_of=("cifar-10-batches-py", "cifar-10-python.tar.gz", "cifar-10-python.tar.xz", "cifar-10-python.tar"),
    wanted=_BATCH,
)
