"""Pairs are read line by line, each text once; AAN's pairs and others are not taken for one another."""

import pytest

from data.sequences.files import PAIRS, Row, pairs
from primaldual.data import DataFormatError, DataMismatchError, DataNotFoundError
from primaldual.data.sequences import SequenceSet, retrieval
from primaldual.data.sequences.retrieval import AAN, MANUAL_PAGES


def read(directory, of=MANUAL_PAGES) -> SequenceSet:
    raw = of.find(directory)
    assert raw is not None
    return raw.prepare()


def texts(data: SequenceSet, part: str) -> list[list[bytes]]:
    return [[bytes((data.documents[i] - 1).tolist()) for i in pair] for pair in data.parts[part].documents.tolist()]


def test_pairs_are_their_texts_cut_after_4000_bytes(tmp_path):
    data = read(pairs(tmp_path))
    for part, name in (("train", "train"), ("validation", "eval"), ("test", "test")):
        assert texts(data, part) == [[one[:4000], two[:4000]] for *_, one, two in PAIRS[name]]
        assert data.parts[part].labels.tolist() == [int(float(str(row[0]))) for row in PAIRS[name]]
    assert data.pairs and (data.length, data.vocabulary, data.documents.shift) == (4096, 257, 1)
    assert data.title == "Retrieval (manual pages)"


def test_a_text_is_kept_once_and_one_id_may_stand_for_two(tmp_path):
    assert len(read(pairs(tmp_path / "a")).documents) == 4  # the two that begin alike are one
    other: list[Row] = [("0", "P01", "P01", b"first paper", b"first paper, revised")]
    data = read(pairs(tmp_path / "b", eval=other))
    assert texts(data, "validation") == [[b"first paper", b"first paper, revised"]] and len(data.documents) == 5


def test_literals_of_python_are_taken_as_they_stand_and_noted(tmp_path):
    literal = rb"b'na\xc3\xafve \\ text'"
    data = read(pairs(tmp_path, eval=[("1.0", "a", "b", literal, b"plain")]))
    assert texts(data, "validation") == [[literal, b"plain"]]
    assert data.notes == ("1 of 6 texts are literals of Python, b'…', taken as they stand",)


def test_pairs_that_were_trained_on_are_counted_in_a_note(tmp_path):
    again: list[Row] = [("0", "x", "y", b"second paper", b"first paper"), ("1", "x", "z", b"second paper", b"third")]
    data = read(pairs(tmp_path, test=again))
    assert data.notes == ("1 of 2 test pairs are training pairs, too, in this order or the other",)


def test_windows_line_ends_do_not_matter(tmp_path):
    before = read(pairs(tmp_path)).hash
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert read(tmp_path).hash == before


def test_other_pairs_are_not_taken_for_those_of_aan_nor_these_for_others(tmp_path, monkeypatch):
    pairs(tmp_path)
    with pytest.raises(DataMismatchError, match=r"not AAN's pairs.* 2 \+ 1 \+ 2, .*147086 \+ 18090.*lra-retrieval-man"):
        read(tmp_path, AAN)
    assert MANUAL_PAGES.is_in(tmp_path) and not AAN.is_in(tmp_path)
    monkeypatch.setattr(retrieval, "AAN_CASES", (2, 1, 2))
    assert (read(tmp_path, AAN).title, AAN.is_in(tmp_path)) == ("Retrieval", True)
    with pytest.raises(DataMismatchError, match="these are AAN's pairs; lra-retrieval is their name"):
        read(tmp_path)


BROKEN: dict[str, tuple[Row, str]] = {
    "cut off": (("1.0", "a", "b", b"text"), "expected 5 columns with tabs between: .* got 4"),
    "of a label": (("yes", "a", "b", b"text", b"text"), "the label must be 0.0 or 1.0, got 'yes'"),
    "without a text": (("1.0", "a", "b", b"text", b""), "a text is empty"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_line_is_named(tmp_path, name):
    row, message = BROKEN[name]
    with pytest.raises(DataFormatError, match=rf"new_aan_pairs\.eval\.tsv, line 2: {message}") as caught:
        read(pairs(tmp_path, eval=[*PAIRS["eval"], row]))
    assert caught.value.line == 2


def test_a_missing_or_empty_file_is_named(tmp_path):
    (pairs(tmp_path) / "new_aan_pairs.test.tsv").write_bytes(b"")
    with pytest.raises(DataFormatError, match=r"new_aan_pairs\.test\.tsv: there are no pairs inside"):
        read(tmp_path)
    (tmp_path / "new_aan_pairs.test.tsv").unlink()
    with pytest.raises(DataNotFoundError, match=r"new_aan_pairs\.test\.tsv is missing"):
        read(tmp_path)
    assert AAN.is_in(tmp_path) and MANUAL_PAGES.is_in(tmp_path)
