"""Windows, prefixes and patterns count from a row's first valid token: alone, and in a left-padded batch, it is one."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ops.test_query_offset import CAUSAL
from primaldual import MultiheadAttention, Primal, attention, mechanism
from primaldual.dual.form import places_of
from primaldual.ops import UnsupportedError, places, plan
from primaldual.primal import DepthwiseConv1d, Fixed, Pooled, TokenMap
from support.battery import FAST, HEADS, PRIMALS, Case, parameters

LENGTHS, WIDTH = (7, 4, 12), 12  # rows hold so many tokens, of so many
EXACT = 1e-10
GRIDDED = {name for name, primal in PRIMALS.items() if "Conv2d" in repr(primal)}


def rows(padding: str = "left") -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Queries, keys and values of a padded batch, whose hidden tokens hold noise; and what is hidden."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS, WIDTH, 4), (HEADS, WIDTH, 4), (HEADS, WIDTH, 5))
    qkv = tuple(torch.randn(3, *shape, generator=generator, dtype=torch.float64) for shape in shapes)
    index, lengths = torch.arange(WIDTH), torch.tensor(LENGTHS)[:, None]
    return qkv, index < WIDTH - lengths if padding == "left" else index >= lengths


def alone(primal: Primal, learned: dict, causal: bool, **options: object) -> list[tuple[Tensor, ...]]:
    """Of every sequence without its padding: output, and the gradients of queries, keys and values."""
    found = []
    for row, length in enumerate(LENGTHS):
        qkv = [x[row : row + 1, :, WIDTH - length :].clone().requires_grad_() for x in rows()[0]]
        made = primal.made(HEADS, 5)
        own = {n: x[row : row + 1, :, WIDTH - length :] if n in made else x for n, x in learned.items()}
        out = attention(*qkv, primal, impl="reference", is_causal=causal, parameters=own, **options)
        found.append((out, *torch.autograd.grad(out.square().sum(), qkv)))
    return found


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", [name for name in PRIMALS if name not in GRIDDED])
def test_a_sequence_alone_and_in_a_left_padded_batch_give_the_same(name: str, causal: bool) -> None:
    primal = PRIMALS[name]
    if (causal and primal.causal_refusal(HEADS)) or name == "sparse-by-length":  # whose stride depends on padding
        return
    learned = parameters(primal, Case(WIDTH, WIDTH), batch=3)
    expected = alone(primal, learned, causal)
    qkv, hidden = rows()
    for impl in ("reference", *FAST):
        given = [x.clone().requires_grad_() for x in qkv]
        try:
            out = attention(*given, primal, key_padding_mask=hidden, query_padding_mask=hidden, is_causal=causal,
                            impl=impl, parameters=learned)  # fmt: skip
        except UnsupportedError:
            continue
        shown = ~hidden[:, None, :, None]
        gradients = torch.autograd.grad(out.masked_fill(~shown, 0.0).square().sum(), given)
        for row, length in enumerate(LENGTHS):
            for what, found, truth in zip("oqkv", (out, *gradients), expected[row], strict=True):
                kept = found[row : row + 1, :, WIDTH - length :]
                torch.testing.assert_close(
                    kept, truth, rtol=0, atol=EXACT, msg=lambda s, i=impl, w=what: f"{i} {w} {s}"
                )
        for gradient in gradients:
            assert not gradient.masked_fill(shown, 0.0).any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["sh", "bn+sh", "sparse-sh", "sparse-fixed", "linear-sh", "sh-prefix"])
def test_weights_are_those_of_the_sequence_alone(name: str, causal: bool) -> None:
    primal, (qkv, hidden) = PRIMALS[name], rows()
    for impl in ("reference", "dense"):
        _, weights = attention(
            *qkv, primal, key_padding_mask=hidden, is_causal=causal, impl=impl, need_weights=True
        )  # fmt: skip
        for row, length in enumerate(LENGTHS):
            own = [x[row : row + 1, :, WIDTH - length :] for x in qkv]
            _, expected = attention(*own, primal, is_causal=causal, impl="reference", need_weights=True)
            torch.testing.assert_close(weights[row : row + 1, :, WIDTH - length :, WIDTH - length :], expected)


@pytest.mark.parametrize("name", [name for name in CAUSAL if name != "sparse-by-length"])
@pytest.mark.parametrize(("offset", "queries"), [(11, 1), (8, 4), (2, 5)])
def test_queries_from_an_offset_on_are_those_rows_of_the_whole(name: str, offset: int, queries: int) -> None:
    primal, ((q, k, v), hidden) = PRIMALS[name], rows()
    whole = attention(q, k, v, primal, key_padding_mask=hidden, is_causal=True, impl="reference")
    part = slice(offset, offset + queries)
    for impl in ("reference", "auto"):
        given = {"key_padding_mask": hidden, "is_causal": True, "impl": impl, "query_offset": offset}
        torch.testing.assert_close(attention(q[:, :, part], k, v, primal, **given), whole[:, :, part])


def test_a_token_that_is_hidden_inside_moves_nothing() -> None:
    (q, k, v), _ = rows()
    inside = torch.zeros(3, WIDTH, dtype=torch.bool)
    inside[:, 1:3] = True
    primal = Primal(training_set=Pooled((4,) * HEADS))
    windows = torch.stack([k[:, :, [0, 3]].mean(2), k[:, :, 4:8].mean(2), k[:, :, 8:].mean(2)], 2)
    values = torch.stack([v[:, :, [0, 3]].mean(2), v[:, :, 4:8].mean(2), v[:, :, 8:].mean(2)], 2)
    torch.testing.assert_close(
        attention(q, k, v, primal, key_padding_mask=inside), attention(q, windows, values, "softmax")
    )


@pytest.mark.parametrize("causal", [False, True])
def test_tokens_stand_where_they_stand_where_that_is_said(causal: bool) -> None:
    (q, k, v), hidden = rows()
    primal = Primal(training_set=Pooled((4,) * HEADS))
    found = attention(q, k, v, primal, key_padding_mask=hidden, is_causal=causal, left_padding=False)
    moved = attention(q, k, v, primal, key_padding_mask=hidden, is_causal=causal)
    own = [x[:1, :, 4:] for x in (q, k, v)]  # of 12 tokens 5 are hidden: the first window is, and one of the second
    expected = attention(*own, primal, key_padding_mask=hidden[:1, 4:], is_causal=causal, left_padding=False)
    torch.testing.assert_close(found[:1, :, 4:], expected)
    assert not torch.allclose(found[0, :, 5:], moved[0, :, 5:])


@pytest.mark.parametrize("route", ["pooled", "separate"])
def test_so_they_do_in_a_layer(route: str) -> None:
    layer = MultiheadAttention(
        24, HEADS, batch_first=True, mechanism=Primal(training_set=Pooled((4,) * HEADS)), left_padding=False,
        dtype=torch.float64, impl=route,
    )  # fmt: skip
    x, hidden = torch.randn(3, WIDTH, 24, dtype=torch.float64), rows()[1]
    whole, _ = layer(x, x, x, key_padding_mask=hidden, need_weights=False)
    windows, _ = layer(*(x[:1, 4:],) * 3, key_padding_mask=hidden[:1, 4:], need_weights=False)
    torch.testing.assert_close(whole[:1, 4:], windows)


@pytest.mark.parametrize("causal", [False, True])
def test_a_bias_on_keys_moves_with_them(causal: bool) -> None:
    (q, k, v), hidden = rows()
    bias = torch.randn(3, WIDTH, dtype=torch.float64)
    found = attention(
        q, k, v, "bn+sh", key_padding_mask=bias.masked_fill(hidden, -torch.inf), is_causal=causal
    )  # fmt: skip
    own = [x[:1, :, 5:] for x in (q, k, v)]
    expected = attention(*own, "bn+sh", key_padding_mask=bias[:1, 5:], is_causal=causal, impl="reference")
    torch.testing.assert_close(found[:1, :, 5:], expected)


def test_a_mask_for_each_query_moves_with_both() -> None:
    (q, k, v), hidden = rows()
    mask = torch.rand(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1)) < 0.3
    primal = mechanism("sparse", pattern=Fixed(4, 2))
    for impl in ("reference", "sdpa", "dense"):
        found = attention(q, k, v, primal, key_padding_mask=hidden, attn_mask=mask, impl=impl)
        own = [x[:1, :, 5:] for x in (q, k, v)]
        expected = attention(*own, primal, attn_mask=mask[5:, 5:], impl="reference")
        torch.testing.assert_close(found[:1, :, 5:], expected)


def test_groups_of_query_heads_are_rolled_too() -> None:
    (q, k, v), hidden = rows()
    k, v = k[:, :3], v[:, :3]
    for causal in (False, True):
        found = attention(q, k, v, "bn+sh", key_padding_mask=hidden, is_causal=causal)
        own = [x[:1, :, 5:] for x in (q, k, v)]
        torch.testing.assert_close(found[:1, :, 5:], attention(*own, "bn+sh", is_causal=causal))


def test_a_token_map_of_ones_own_counts_from_the_first_token() -> None:
    class Fading(TokenMap):
        def tokens(self, x: Tensor, parameters: object) -> Tensor:
            return x * (-0.1 * torch.arange(x.shape[2], dtype=x.dtype)).exp()[:, None]

    (q, k, v), hidden = rows()
    primal = Primal(inputs=(Fading(),))
    found = attention(q, k, v, primal, key_padding_mask=hidden)
    own = [x[:1, :, 5:] for x in (q, k, v)]
    torch.testing.assert_close(found[:1, :, 5:], attention(*own, primal))


@pytest.mark.parametrize("name", ["bn+sh", "sh-max", "sparse", "linear-sh"])
@pytest.mark.parametrize("route", ["auto", "pooled", "separate"])
def test_so_it_is_in_a_layer(name: str, route: str) -> None:
    layer = MultiheadAttention(4 * HEADS, HEADS, batch_first=True, mechanism=PRIMALS[name], dtype=torch.float64)
    x, hidden = torch.randn(3, WIDTH, 4 * HEADS, dtype=torch.float64), rows()[1]
    if route != "auto":
        layer.impl = route
        try:
            layer.plan(x, key_padding_mask=hidden)
        except UnsupportedError:
            return
    found, _ = layer(x, x, x, key_padding_mask=hidden, need_weights=False)
    expected, _ = layer(*(x[:1, 5:],) * 3, need_weights=False)
    torch.testing.assert_close(found[:1, 5:], expected)


COUNTED = {
    "softmax": "none", "bn": "none", "conv1d": "none", "sparse": "none", "sparse-diagonal": "none", "linear": "none",
    "sh": "keys", "sh-conv": "keys", "linear-full+sh": "keys", "sh-kmeans": "none", "conv2d": "none",
    "sparse-fixed": "queries", "sparse-sh": "queries",
}  # fmt: skip


@pytest.mark.parametrize(("name", "counted"), COUNTED.items())
def test_only_what_counts_places_is_rolled(name: str, counted: str) -> None:
    primal = PRIMALS[name]
    assert places_of(primal, primal.training_set.head_scales(HEADS), False) == counted
    (q, k, v), hidden = rows()
    if name == "conv2d":
        return
    moved = plan(q, k, v, primal, key_padding_mask=hidden).sizes.copied
    assert (moved > 0) == (counted != "none")


def test_the_values_of_a_mask_are_looked_at_on_a_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    _, hidden = rows("right")
    primal, scales = mechanism("sh"), mechanism("sh").training_set.head_scales(HEADS)
    assert places.start_of(primal, scales, hidden) is None
    assert places.start_of(primal, scales, hidden.to("meta")) is not None  # has no values, as a GPU's are not seen
    monkeypatch.setattr(places, "_may_move", lambda hidden: True)
    (q, k, v), _ = rows()
    rolled = attention(q, k, v, primal, key_padding_mask=hidden)  # by nothing
    monkeypatch.undo()
    torch.testing.assert_close(rolled, attention(q, k, v, primal, key_padding_mask=hidden), rtol=0, atol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_rows_roll_in_a_compiled_function_and_under_vmap(causal: bool) -> None:
    (q, k, v), hidden = rows()
    primal = mechanism("bn+sh")

    def run(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        return attention(q, k, v, primal, key_padding_mask=hidden, is_causal=causal, impl="dense")

    expected = run(q, k, v, hidden)
    torch.testing.assert_close(torch.compile(run, backend="eager", fullgraph=True)(q, k, v, hidden), expected)
    many = (torch.stack([x, x]) for x in (q, k, v, hidden))
    torch.testing.assert_close(torch.vmap(run)(*many)[1], expected)


def test_queries_before_the_first_token_of_their_row_see_no_key_of_a_pattern() -> None:
    (q, k, v), hidden = rows()
    primal = replace(mechanism("sparse-sh", pattern=Fixed(4, 1)), inputs=(DepthwiseConv1d(3),))
    out = attention(q, k, v, primal, key_padding_mask=hidden)
    assert not out[0, :, :5].any() and out[0, :, 5:].any()
