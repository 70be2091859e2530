"""Which keys a query of a sparse head sees."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from primaldual.primal import Fixed, Pattern, Pooled, Sparse, Strided, Window, sparse
from primaldual.primal.patterns import near_root

patterns = st.one_of(
    st.builds(Strided, st.one_of(st.none(), st.integers(1, 12))),
    st.builds(Window, st.one_of(st.none(), st.integers(0, 12))),
    st.integers(1, 4).flatmap(lambda c: st.builds(Fixed, st.one_of(st.none(), st.integers(c, 12)), st.just(c))),
)


def allowed(pattern: Pattern, queries: int, length: int) -> list[list[bool]]:
    return pattern.allows(torch.arange(queries)[:, None], torch.arange(length), length).tolist()


@given(stride=st.integers(1, 12), length=st.integers(1, 30))
def test_strided_keeps_the_near_and_every_lth(stride, length):
    expected = [[abs(i - j) < stride or (i - j) % stride == 0 for j in range(length)] for i in range(length)]
    assert allowed(Strided(stride), length, length) == expected


@given(block=st.integers(1, 12), summary=st.integers(1, 12), length=st.integers(1, 30))
def test_fixed_keeps_the_own_block_and_the_last_of_every_block(block, summary, length):
    summary = min(summary, block)
    expected = [
        [i // block == j // block or j % block >= block - summary for j in range(length)] for i in range(length)
    ]
    assert allowed(Fixed(block, summary), length, length) == expected


@given(radius=st.integers(0, 12), length=st.integers(1, 30))
def test_window_keeps_the_near(radius, length):
    expected = [[abs(i - j) <= radius for j in range(length)] for i in range(length)]
    assert allowed(Window(radius), length, length) == expected


@pytest.mark.parametrize(
    ("length", "root"), [(0, 1), (1, 1), (2, 1), (3, 2), (6, 2), (7, 3), (12, 3), (13, 4), (100, 10), (1024, 32)]
)
def test_without_a_size_it_is_the_integer_nearest_to_the_root_of_the_length(length, root):
    assert near_root(length) == root
    for pattern in (Strided, Fixed, Window):
        assert allowed(pattern(None), length, length) == allowed(pattern(root), length, length)


@pytest.mark.parametrize("pattern", [Strided, Fixed, Window])
def test_the_default_size_is_the_same_at_every_length_and_that_of_the_length_is_asked_for(pattern):
    assert pattern() == pattern(32)
    assert pattern().causal_refusal() is None
    assert f"give a number, such as {pattern.__name__}(32)" in pattern(None).causal_refusal()


@pytest.mark.parametrize(("kind", "size"), [("Strided", "stride"), ("Fixed", "block"), ("Window", "radius")])
def test_a_record_of_a_pattern_of_the_length_is_still_that(kind, size):
    assert Pattern.from_dict({"kind": kind, size: None}).causal_refusal() is not None


@given(pattern=patterns, queries=st.integers(1, 40), length=st.integers(1, 40))
def test_every_query_with_a_key_of_its_own_place_sees_it(pattern, queries, length):
    seen = allowed(pattern, queries, length)
    assert all(seen[i][i] for i in range(min(queries, length)))


@given(pattern=patterns, queries=st.integers(1, 40), length=st.integers(1, 40))
def test_the_pieces_are_disjoint_and_together_what_is_kept(pattern, queries, length):
    i, j = torch.arange(queries)[:, None], torch.arange(length)
    times = sum(piece.allows(i, j).int() for piece in pattern.pieces(length))
    assert torch.equal(times, pattern.allows(i, j, length).int())


@given(pattern=patterns, queries=st.integers(1, 40), tokens=st.integers(1, 40), at_once=st.integers(1, 100))
def test_a_long_pattern_is_made_of_the_same_rows_one_after_the_other(pattern, queries, tokens, at_once):
    training_set = Sparse(pattern, Pooled((1, 2)))
    device = torch.device("cpu")
    whole = training_set.visible(2, queries, tokens, device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse, "PAIRS_AT_ONCE", at_once)
        assert torch.equal(training_set.visible(2, queries, tokens, device), whole)


@given(pattern=patterns, length=st.integers(1, 40))
def test_a_piece_says_whether_a_query_sees_its_own_key_in_it(pattern, length):
    i = torch.arange(length)
    for piece in pattern.pieces(length):
        assert piece.allows(i, i).tolist() == [piece.own] * length


def test_a_pattern_that_does_not_say_where_its_keys_lie_has_no_pieces():
    assert Pattern().pieces(10) is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Strided(0), "stride must be an integer of at least 1, got 0"),
        (lambda: Strided(2.0), "stride must be an integer of at least 1, got 2.0"),
        (lambda: Fixed(4, 0), "summary must be an integer of at least 1, got 0"),
        (lambda: Fixed(2, 3), "block must be an integer of at least 3, got 2"),
        (lambda: Window(-1), "radius must be an integer of at least 0, got -1"),
        (lambda: Window(True), "radius must be an integer of at least 0, got True"),
    ],
    ids=["stride 0", "stride 2.0", "summary 0", "summary over block", "radius -1", "radius True"],
)
def test_a_pattern_that_makes_no_sense_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
