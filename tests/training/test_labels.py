"""Class labels go to JSON and come back of the same type."""

import datetime
import json

import numpy as np
import pytest

from primaldual.training.labels import LARGEST, labels_from_json, labels_to_json

DAY, TIME = datetime.date(2024, 5, 1), datetime.datetime(2024, 5, 1, 12, 30, 1, 5)


@pytest.mark.parametrize(
    "labels",
    [
        np.array([0, 1]), np.array([0.1, -1e300]), np.array([True, False]), np.array(["a", "bb"]),
        np.array(["a", 1, None, True, b"\xff", DAY, TIME, np.datetime64(3, "ns")], dtype=object),
        np.array(["2024-05-01", "2025-06-02"], dtype="datetime64[D]"), np.array([1, 2], dtype="timedelta64[ns]"),
        np.array(["2024-05-01T10:00:00.000000001"], dtype="datetime64[ns]"), np.array([b"a", b"bc"]),
    ],
    ids=str,
)  # fmt: skip
def test_labels_come_back(labels):
    found = labels_from_json(json.loads(json.dumps(labels_to_json(labels))))
    assert found.dtype == labels.dtype and [type(x) for x in found.tolist()] == [type(x) for x in labels.tolist()]
    np.testing.assert_array_equal(found, labels)


@pytest.mark.parametrize("label", [1j, (1, 2)], ids=str)
def test_what_has_no_way_back_is_named(label):
    with pytest.raises(TypeError, match=f"a label of type {type(label).__name__} cannot be kept"):
        labels_to_json(np.array([label, None], dtype=object)[:1])


@pytest.mark.parametrize(
    "data",
    [{"dtype": f"<U{LARGEST}", "values": ["a"]}, {"dtype": "(1000000,)f8", "values": [1.0]},
     {"dtype": "c16", "values": [1]}, {"dtype": "O", "values": [[1]]}],
    ids=str,
)  # fmt: skip
def test_what_no_labels_can_be_is_refused_before_memory_is_taken(data):
    with pytest.raises(ValueError, match="label"):
        labels_from_json(data)
