"""The `.ts` reader gives what aeon's gives, and an error names its line."""

import re
from pathlib import Path

import numpy as np
import pytest

from data.files import HEADER, ROWS, text
from primaldual.data.errors import DataFormatError
from primaldual.data.sources import aeon_directory, read_file
from primaldual.data.ts import TsFile, read_ts

FIRST = HEADER.count("\n") + 1
"""The line of the first series."""


def read(content: str) -> TsFile:
    return read_ts(content.splitlines(), "toy.ts")


@pytest.mark.parametrize("name", ["BasicMotions", "JapaneseVowels", "Covid3Month"])
def test_values_and_labels_are_those_of_aeons_loader(name):
    datasets = pytest.importorskip("aeon.datasets")
    path = aeon_directory() / name / f"{name}_TEST.ts"
    series, labels = datasets.load_from_ts_file(str(path))
    mine = read_file(path)
    assert len(mine.series) == len(series)
    assert all(np.array_equal(a, b.T) for a, b in zip(mine.series, series, strict=True))
    same = np.array(mine.labels, dtype=labels.dtype)
    assert np.array_equal(same, labels)


def test_missing_values_are_nan_and_labels_lower_case():
    file = read(text())
    np.testing.assert_array_equal(file.series[1], [[7, 1], [8, np.nan], [np.nan, 2]])
    assert (file.kind, file.labels, file.channels, file.doubts) == ("classification", ["a", "b", "a"], 2, [])


def test_blank_lines_comments_a_byte_order_mark_and_windows_line_ends_do_not_matter(tmp_path: Path):
    path = tmp_path / "toy.ts"
    path.write_bytes(
        b"\xef\xbb\xbf" + text("", "# half-time: \xe9", *ROWS, "", "").replace("\n", "\r\n").encode("latin-1")
    )
    assert read_file(path).labels == ["a", "b", "a"]


def test_time_stamps_are_dropped_and_signs_kept():
    stamps = HEADER.replace("@timeStamps false", "@timeStamps true")
    file = read(text("(2020-01-01 00:00:00,-1.5),(2020-01-01 00:00:01,2):(0,3),(1,?):a", header=stamps))
    np.testing.assert_array_equal(file.series[0], [[-1.5, 3], [2, np.nan]])


def test_regression_targets_are_read_as_they_stand():
    header = HEADER.replace("@classLabel true b A", "@targetLabel true")
    file = read(text("1,2,3:4,5,6:-1.25", header=header))
    assert (file.kind, file.labels) == ("regression", ["-1.25"])


BROKEN = {
    "cut off in the last line": ((*ROWS, "7,8,9:1,2"), 3, "expected 2 channels as in other series, got 1"),
    "channels of two lengths": ((ROWS[0], "7,8,9:1:b", ROWS[2]), 1, "one length, got 3, 1"),
    "channel missing in the first": (("1,2,3:a", *ROWS), 0, "expected 2 channels as in other series, got 1"),
    "no separator": ((*ROWS, "1,2,3"), 3, "with ':' between"),
    "another length": ((*ROWS, "1,2:3,4:a"), 3, "expected 3 steps as in other series, got 2"),
    "not a number": ((ROWS[0], "7,8,x1:1,2,3:b"), 1, "channel 1, step 3: 'x1' is not a number"),
    "empty value": ((ROWS[0], "7,8,9:1,,3:b"), 1, "channel 2, step 2: '' is not a number"),
    "infinite": ((ROWS[0], "7,8,9:1,inf,3:b"), 1, "channel 2, step 2: 'inf' is not a number"),
    "digits with an underscore": (("7,8,9:1,1_0,3:b",), 0, "'1_0' is not a number"),
    "no class": (("7,8,9:1,2,3:",), 0, "the class is missing"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_series_is_an_error_with_its_line(name):
    rows, at, message = BROKEN[name]
    with pytest.raises(DataFormatError, match=f"toy.ts, line {FIRST + at}: .*{re.escape(message)}") as caught:
        read(text(*rows))
    assert (caught.value.file, caught.value.line) == ("toy.ts", FIRST + at)


HEADERS = {
    "no data": (text().partition("@data")[0], FIRST - 2, "ends before @data"),
    "no series": (text().partition(ROWS[0])[0], FIRST - 1, "no series"),
    "no tag": ("hello\n" + text(), 1, "expected a tag"),
    "no boolean": (text().replace("@equalLength true", "@equalLength maybe"), 7, "true or false, got maybe"),
    "a count that is none": (text().replace("@dimensions 2", "@dimensions ²"), 6, "must be a number, got ²"),
    "a count that is endless": (text().replace("@dimensions 2", "@dimensions " + "9" * 5000), 6, "must be a number"),
    "an empty tag": (text().replace("@missing true", "@"), 4, "expected a tag such as @problemName, or @data; got '@'"),
    "no count": (text().replace("@dimensions 2", "@dimensions two"), 6, "must be a number, got two"),
    "no labels": (text().replace("@classLabel true b A", "@classLabel false"), 8, "nothing to learn"),
    "no classes": (text().replace("@classLabel true b A", "@classLabel true"), 8, "followed by the classes"),
    "no target": (text().replace("@classLabel true b A", "@targetLabel true"), FIRST, "a finite number, got 'a'"),
    "empty": ("", 0, "ends before @data"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_broken_header_is_an_error_with_its_line(name):
    content, line, message = HEADERS[name]
    with pytest.raises(DataFormatError, match=f"toy.ts, line {line}: .*{re.escape(message)}"):
        read(content)


DOUBTFUL = {
    "dimensions": (text().replace("@dimensions 2", "@dimensions 3"), 6, "says 3 channels, the series have 2"),
    "length": (text(header="@seriesLength 4\n" + HEADER), 1, "says 4 steps, the series have 3"),
    "univariate": (text().replace("@univariate false", "@univariate true"), 5, "2 channels"),
    "class": (text(*ROWS, "1,2,3:4,5,6:c"), FIRST + 3, "class 'c' is not one of those"),
    "spaces": (text(*ROWS, "1,2,3:4,5,6:two words"), FIRST + 3, "the name of a class has no spaces"),
}


@pytest.mark.parametrize("name", DOUBTFUL)
def test_a_header_that_disagrees_is_a_doubt_with_its_line(name):
    content, line, message = DOUBTFUL[name]
    file = read(content)
    assert [doubt.line for doubt in file.doubts] == [line]
    with pytest.raises(DataFormatError, match=f"toy.ts, line {line}: .*{re.escape(message)}"):
        file.refuse_doubts()
