"""Documents side by side: what is put in comes out, and the hash is of what a model sees."""

from dataclasses import replace

import numpy as np
import pytest

from primaldual.data.sequences import Cases, Documents, content_hash, side_by_side


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("lengths", [[3, 0, 4], [1, 1], [2, 5, 1, 8], []])
def test_tokens_come_out_as_they_went_in(bits, lengths):
    tokens = [np.random.default_rng(i).integers(0, 2**bits, n, dtype=np.uint8) for i, n in enumerate(lengths)]
    flat = np.concatenate([np.zeros(0, np.uint8), *tokens])
    documents = side_by_side(flat, np.array(lengths, dtype=np.int64), shift=1, bits=bits)
    assert documents.raw.nbytes == -(-sum(lengths) * bits // 8) and len(documents) == len(lengths)
    for one, given in enumerate(tokens):
        assert documents[one].tolist() == [token + 1 for token in given.tolist()]


def test_documents_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="documents of 5 tokens together are made of 4"):
        side_by_side(np.zeros(4, np.uint8), np.array([2, 3]))
    with pytest.raises(ValueError, match="at most 15, not 16"):
        side_by_side(np.array([16], np.uint8), np.array([1]), bits=4)


def one_set() -> tuple[Documents, dict[str, Cases]]:
    documents = side_by_side(np.arange(6, dtype=np.uint8), np.array([2, 4]))
    parts = {"train": Cases(np.array([0]), np.array([1])), "test": Cases(np.array([1]), np.array([0]))}
    return documents, parts


def test_the_hash_does_not_depend_on_how_the_arrays_are_held(tmp_path):
    documents, parts = one_set()
    path = tmp_path / "raw"
    documents.raw.tofile(path)
    mapped = replace(documents, raw=np.memmap(path, np.uint8, "r"), offsets=documents.offsets.astype(">i8"))
    backwards = dict(reversed([*parts.items()]))
    assert content_hash(mapped, backwards) == content_hash(documents, parts)


def test_whatever_a_model_sees_enters_the_hash():
    documents, parts = one_set()
    train = parts["train"]
    others = [
        (replace(documents, raw=documents.raw[::-1]), parts),
        (replace(documents, offsets=np.array([0, 3, 6])), parts),
        (replace(documents, shift=0), parts),
        (replace(documents, bits=4), parts),
        (documents, {"train": train}),
        (documents, {**parts, "train": Cases(np.array([1]), train.labels)}),
        (documents, {**parts, "train": Cases(train.documents, np.array([0]))}),
        (documents, {"test": train, "train": parts["test"]}),
        (documents, {**parts, "train": Cases(train.documents[:, None], train.labels)}),
    ]
    assert len({content_hash(*one) for one in [(documents, parts), *others]}) == 1 + len(others)
