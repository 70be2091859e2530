"""Queries that are the last of a longer sequence, and the factor on the scores."""

import math

import pytest
import torch

from primaldual import Primal, attention, mechanism
from primaldual.ops import EXECUTORS
from primaldual.ops.problem import state
from primaldual.primal import EluPlusOne, Taylor, Window
from support.battery import HEADS, PRIMALS

CAUSAL = [
    name
    for name, primal in PRIMALS.items()
    if not (primal.mixing_maps or primal.causal_refusal(HEADS) or "unit" in name)
]


def tensors(queries: int, keys: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, HEADS, n, 4, generator=generator, dtype=torch.float64) for n in (queries, keys, keys))


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize(("offset", "queries"), [(12, 1), (8, 5), (3, 4)])
def test_queries_from_an_offset_on_are_those_rows_of_the_whole(name: str, offset: int, queries: int) -> None:
    primal = PRIMALS[name]
    q, k, v = tensors(13, 13)
    hidden = torch.zeros(2, 13, dtype=torch.bool)
    hidden[0, :2] = hidden[1, 5] = True
    rows = slice(offset, offset + queries)
    given = {"key_padding_mask": hidden, "is_causal": True}
    for impl in ("reference", "auto"):
        whole = attention(q, k, v, primal, impl=impl, **given)
        part = attention(q[:, :, rows], k, v, primal, impl=impl, query_offset=offset, **given)
        torch.testing.assert_close(part, whole[:, :, rows], atol=1e-12, rtol=1e-12)


def test_a_pattern_is_that_of_the_queries_own_places_without_causality_too() -> None:
    q, k, v = tensors(13, 13)
    primal = mechanism("sparse", pattern=Window(2))
    whole = attention(q, k, v, primal)
    torch.testing.assert_close(attention(q[:, :, 9:], k, v, primal, query_offset=9), whole[:, :, 9:])
    assert not torch.allclose(attention(q[:, :, 9:], k, v, primal), whole[:, :, 9:])


def test_a_mask_beside_causality_counts_from_the_offset() -> None:
    q, k, v = tensors(3, 8)
    beyond = torch.ones(3, 8, dtype=torch.bool).triu(6)  # no more than is_causal with an offset of 5
    expected = attention(q, k, v, "sh", is_causal=True, query_offset=5)
    torch.testing.assert_close(attention(q, k, v, "sh", is_causal=True, query_offset=5, attn_mask=beyond), expected)
    with pytest.raises(ValueError, match="says more than is_causal"):
        attention(q, k, v, "sh", is_causal=True, query_offset=6, attn_mask=beyond)


def test_without_an_offset_the_first_query_sees_the_first_key_alone() -> None:
    q, k, v = tensors(3, 8)
    torch.testing.assert_close(attention(q, k, v, "softmax", is_causal=True)[:, :, 0], v[:, :, 0])


@pytest.mark.parametrize("name", ["softmax", "bn", "bn-full", "sh-uneven", "rms-then-bn", "unit", "linear-taylor"])
def test_the_scale_is_the_factor_on_the_scores(name: str) -> None:
    q, k, v = tensors(9, 9)
    primal = PRIMALS[name]
    usual = attention(q, k, v, primal)
    torch.testing.assert_close(attention(q, k, v, primal, scale=1 / math.sqrt(4)), usual)
    if not primal.point_maps:  # the map would not leave the factor as it is
        twice = attention(2 * q, k, v, primal)
        torch.testing.assert_close(attention(q, k, v, primal, scale=2 / math.sqrt(4)), twice)
    assert not torch.allclose(attention(q, k, v, primal, scale=1.0), usual)


def test_bad_offsets_and_scales_are_refused_with_what_to_do() -> None:
    q, k, v = tensors(3, 8)
    for offset in (-1, 1.5, True):
        with pytest.raises(ValueError, match="query_offset must be an integer of at least 0"):
            attention(q, k, v, "softmax", query_offset=offset)
    with pytest.raises(ValueError, match="give the queries of the whole sequence"):
        attention(q, k, v, "conv1d", query_offset=2)
    for scale in (0.0, -1.0, float("nan"), "1"):
        with pytest.raises(ValueError, match="scale must be a positive number"):
            attention(q, k, v, "softmax", scale=scale)
    with pytest.raises(ValueError, match="has no factor on q·k"):
        attention(q, k, v, Primal(features=EluPlusOne()), scale=1.0)
    attention(q, k, v, Primal(features=Taylor(2)), scale=1.0)


def test_what_was_planned_before_is_not_taken_for_another_offset_or_scale() -> None:
    q, k, v = tensors(3, 8)
    found = [attention(q, k, v, "softmax", is_causal=True, query_offset=o) for o in (0, 5, 0)]
    found += [attention(q, k, v, "softmax", is_causal=True, scale=s) for s in (None, 2.0)]
    assert torch.equal(found[0], found[2]) and torch.equal(found[0], found[3])
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[0], found[4])


def test_a_step_of_decoding_makes_no_mask() -> None:
    q, k, v = tensors(1, 64)
    p = state(q, k, v, mechanism("softmax"), is_causal=True, query_offset=63)
    assert torch.equal(EXECUTORS["sdpa"].run(p)[0], torch.nn.functional.scaled_dot_product_attention(q, k, v))
