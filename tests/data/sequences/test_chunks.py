"""Work in chunks comes back in their order, as far as it is asked for."""

import os
from contextlib import closing
from itertools import count

import pytest

from primaldual.data.sequences.chunks import in_order, settings_hash, stream


def test_endless_work_is_done_as_far_as_it_is_asked_for():
    done: list[int] = []
    with closing(in_order(lambda chunk: done.append(chunk) or chunk**2, count(), processes=1)) as results:
        assert [next(results) for _ in range(3)] == [0, 1, 4]
    assert done == [0, 1, 2]


@pytest.mark.deep
def test_a_process_that_dies_is_an_error_that_says_what_to_do():
    with pytest.raises(RuntimeError, match=r"a process that generates died: .* processes=1 works in this process"):
        list(in_order(os._exit, range(3), processes=2))


def test_parts_of_the_work_have_random_numbers_of_their_own():
    drawn = [stream(seed, *part).random() for seed in (0, 1) for part in ((), (0,), (14,), (14, 0), (0, 14))]
    assert len(set(drawn)) == 10 and drawn[1] == stream(0, 0).random()


def test_the_hash_of_settings_is_of_their_values_and_not_of_their_order():
    assert settings_hash("a", 1, x=1, y=2) == settings_hash("a", 1, y=2, x=1)
    assert len({settings_hash(*one, x=x) for one in (("a", 1), ("a", 2), ("b", 1)) for x in (1, 2)}) == 6
