"""ListOps: every label is the value of its expression, and expressions are as long and deep as the published ones."""

from math import ceil
from statistics import median

import numpy as np
import pytest

from primaldual.data.sequences import expressions, listops
from primaldual.data.sequences.chunks import stream

SMALL = (60, 3, 2)
OPERATORS = {"[MIN": min, "[MAX": max, "[MED": lambda x: int(median(x)), "[SM": lambda x: sum(x) % 10}


def value(text: str) -> tuple[int, int, set[int]]:
    """Of an expression's words, parentheses ignored; with the depth of its operators and their numbers of arguments."""
    stack, deepest, arguments = [("", [])], 0, set()
    for word in text.split():
        if word in OPERATORS:
            stack.append((word, []))
            deepest = max(deepest, len(stack) - 1)
        elif word == "]":
            name, given = stack.pop()
            arguments.add(len(given))
            stack[-1][1].append(OPERATORS[name](given))
        elif word not in "()":
            stack[-1][1].append(int(word))
    [(_, [result])] = stack
    return result, deepest, arguments


def curried(text: str) -> int:
    """Of an expression in parentheses, whose brackets are ignored: a pair is a call with one more argument."""
    opened: list[list] = [[]]
    for word in text.split():
        if word == "(":
            opened.append([])
        elif word != ")":
            opened[-1].append(word)
        else:
            function, argument = opened.pop()
            call = [function] if isinstance(function, str) else function
            opened[-1].append(OPERATORS[call[0]](call[1:]) if argument == "]" else [*call, int(argument)])
    return opened[0][0]


@pytest.fixture(scope="module")
def data():
    return listops.generate(seed=5, brackets=True, sizes=(300, 20, 10), processes=1)


@pytest.fixture(scope="module")
def many() -> expressions.Expressions:
    chunks = [expressions.grow(stream(11, chunk), 8192) for chunk in range(9)]
    return expressions.Expressions(*(np.concatenate(arrays) for arrays in zip(*chunks, strict=True)))


@pytest.mark.parametrize("part", listops.PARTS)
def test_every_expression_evaluates_to_its_label(data, part):
    header, *lines = listops.lines(data, part)
    assert header == "Source\tTarget" and len(lines) == len(data.parts[part])
    for text, label in (line.split("\t") for line in lines):
        result, depth, arguments = value(text)
        assert result == curried(text) == int(label)
        assert depth <= 9 and arguments <= set(range(2, 11))  # of the ten levels the last one is of digits


def test_the_median_is_cut_to_an_integer_and_that_matters(data, monkeypatch):
    monkeypatch.setitem(OPERATORS, "[MED", lambda x: ceil(median(x)))
    _, *lines = listops.lines(data, "train")
    assert any(value(text)[0] != int(label) for text, label in (line.split("\t") for line in lines))


def test_lengths_and_labels_are_distributed_as_published(many):
    n = len(many.labels)
    assert n > 5500
    assert many.lengths.min() > 500 and many.lengths.max() < 2000
    opened = np.add.reduceat(many.tokens == expressions.CLOSE, np.cumsum(many.lengths) - many.lengths, dtype=int)
    lengths = many.lengths - opened
    # the published 895 ± 336, 16.6 % and 17.3 % are of 4,000 expressions; four standard errors of the difference
    error = 4 * np.sqrt(1 / n + 1 / 4000)
    assert abs(lengths.mean() - 895) < error * 336
    assert abs(lengths.std() - 336) < error * 336 / np.sqrt(2)
    for label, share in ((0, 0.166), (9, 0.173)):
        assert abs(np.mean(many.labels == label) - share) < error * np.sqrt(share * (1 - share))


def test_operators_digits_and_numbers_of_arguments_are_uniform(many):
    counts = np.bincount(many.tokens, minlength=15)
    for kinds in (counts[:10], counts[10:14]):
        expected = kinds.sum() / len(kinds)
        assert np.sum((kinds - expected) ** 2 / expected) < 40  # χ² of at most 9 degrees of freedom: p < 1e-5


def test_eight_in_a_hundred_tries_are_kept(many):
    assert abs(len(many.labels) / (9 * 8192) - 0.081) < 4 * np.sqrt(0.081 * (1 / (9 * 8192) + 1 / 49_000))


def test_brackets_are_all_that_tells_the_two_tokenisations_apart(data):
    bare = listops.generate(seed=5, sizes=(300, 20, 10), processes=1)
    assert (bare.vocabulary, data.vocabulary) == (15, 16)
    for part, cases in data.parts.items():
        assert np.array_equal(cases.labels, bare.parts[part].labels)
        for document in cases.documents:
            ids = data.documents[document]
            assert ids.min() >= 1 and np.array_equal(ids[ids != 15], bare.documents[document])


def test_every_expression_is_there_once_and_in_one_part(data):
    documents = [tuple(data.documents[i]) for i in range(len(data.documents))]
    assert len(set(documents)) == 330
    used = np.concatenate([cases.documents for cases in data.parts.values()])
    assert sorted(used) == list(range(330))
    assert [len(data.parts[part]) for part in listops.PARTS] == [300, 20, 10]


def test_an_expression_that_was_there_is_left_out(monkeypatch):
    grown = listops._chunk(0, 0)
    monkeypatch.setattr(listops, "_chunk", lambda seed, chunk: listops.grow(stream(seed, chunk // 2), 8192))
    first = len(grown.labels)
    twice = listops.generate(sizes=(first, 1, 1), brackets=True, processes=1)
    second = listops.grow(stream(0, 1), 8192)
    assert np.array_equal(twice.parts["train"].labels, grown.labels)
    assert np.array_equal(twice.documents[first] - 1, second.tokens[: second.lengths[0]])


def test_the_same_seed_gives_the_same_bytes_on_one_process_and_on_two():
    done: list[tuple[int, int]] = []
    sizes = (1400, 2, 2)  # of three chunks
    one = listops.generate(seed=3, sizes=sizes, processes=1, progress=lambda *now: done.append(now))
    two = listops.generate(seed=3, sizes=sizes, processes=2)
    assert one.hash == two.hash and one.source_hash == two.source_hash
    assert np.array_equal(one.documents.raw, two.documents.raw)
    assert len(done) == 3 and done[-1] == (1404, 1404)


def test_another_seed_gives_other_expressions():
    hashes = {listops.generate(seed=seed, sizes=SMALL, processes=1).hash for seed in (0, 1)}
    assert len(hashes) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1}, "seed is -1: take 0 or a larger"),
        ({"sizes": (5, 5)}, r"sizes is \(5, 5\): take three, for train, validation, test"),
        ({"sizes": (5, 0, 5)}, "of 1 or more expressions"),
        ({"processes": 0}, "processes is 0: take 1 or more, or None"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        listops.generate(**{"processes": 1} | arguments)


def test_what_has_no_brackets_cannot_be_written_as_text():
    bare = listops.generate(sizes=SMALL, processes=1)
    with pytest.raises(ValueError, match="lra-listops does not say how its expressions are nested: take generate"):
        next(listops.lines(bare, "test"))
    with pytest.raises(ValueError, match="1 brackets are not closed"):
        listops.source(np.array([10, 2, 3]))
    with pytest.raises(ValueError, match="closes that none has opened"):
        listops.source(np.array([2, 14]))
