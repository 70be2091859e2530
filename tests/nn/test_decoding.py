"""Decoding with a cache is the full causal forward, row by row: of any mechanism, in any pieces, with any padding."""

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from primaldual import MultiheadAttention, Primal, mechanism
from primaldual.nn import ConvProjection, SolvedAttention
from primaldual.ops import CausalFormError, UnsupportedError
from primaldual.primal import (
    AllKeys,
    BatchNorm,
    DepthwiseConv1d,
    Exponential,
    Fixed,
    Forget,
    Gaussian,
    PointMap,
    Pooled,
    PositionMap,
    Recenter,
    Sparse,
    TokenMap,
    Window,
)  # fmt: skip
from support.battery import HEADS, PRIMALS

WIDTH = 24
DECODED = [
    name for name, primal in PRIMALS.items() if not primal.causal_refusal(HEADS) and "Conv2d" not in repr(primal)
]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}


def layer_of(
    primal: Primal | str, dtype: torch.dtype = torch.float64, heads: int = HEADS, **given
) -> MultiheadAttention:
    """With all that is learned moved away from its start."""
    torch.manual_seed(0)
    layer = MultiheadAttention(4 * heads, heads, batch_first=True, mechanism=primal, dtype=dtype, **given).eval()
    with torch.no_grad():
        for x in (*layer.learned.values(), *(x for made in layer.made.values() for x in made.parameters())):
            x.add_(0.2 * torch.randn_like(x))
    return layer


def inputs(rows: int, length: int, dtype: torch.dtype = torch.float64, width: int = WIDTH) -> Tensor:
    return torch.randn(rows, length, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


@torch.no_grad()
def whole(layer: MultiheadAttention, x: Tensor) -> Tensor:
    return layer(x, x, x, is_causal=True, need_weights=False)[0]


def in_pieces(layer: MultiheadAttention, x: Tensor, cuts: list[int], **given) -> Tensor:
    cache = layer.cache(len(x), **given)
    return torch.cat([layer.decode(piece, cache) for piece in x.split(cuts, 1)], 1)


@pytest.mark.parametrize("name", DECODED)
def test_steps_and_pieces_are_the_whole(name: str) -> None:
    layer, x = layer_of(PRIMALS[name]), inputs(2, 21)
    expected = whole(layer, x)
    for cuts in ([1] * 21, [6, 1, 1, 9, 4]):
        for length in (None, 30):
            torch.testing.assert_close(in_pieces(layer, x, cuts, length=length), expected, atol=1e-9, rtol=0)


@dataclass(frozen=True)
class Configuration:
    """One of many, drawn."""

    name: str
    dtype: torch.dtype
    kv_heads: int
    lengths: tuple[int, ...]
    side: str
    pieces: int
    static: bool
    seed: int

    def __str__(self) -> str:
        return f"{self.seed}-{self.name}-kv{self.kv_heads}-{self.side}-{str(self.dtype)[6:]}"


def drawn(seed: int) -> Configuration:
    choose = random.Random(seed)
    lengths = tuple(choose.randint(1, 24) for _ in range(3))
    while True:
        name, kv_heads = choose.choice(DECODED), choose.choice((1, 2, 3, 6))
        try:
            layer_of(PRIMALS[name], num_kv_heads=kv_heads)
        except ValueError:  # a group of heads of several scales
            continue
        return Configuration(
            name, choose.choice((torch.float32, torch.float64)), kv_heads, lengths, choose.choice(("left", "right")),
            choose.randint(1, 4), choose.random() < 0.5, seed,
        )  # fmt: skip


@pytest.mark.parametrize("drawn", [drawn(seed) for seed in range(40)], ids=str)
def test_rows_of_a_padded_batch_are_what_they_are_alone(drawn: Configuration) -> None:
    primal, steps, longest = PRIMALS[drawn.name], 6, max(drawn.lengths)
    wide = layer_of(primal, num_kv_heads=drawn.kv_heads)
    layer = layer_of(primal, num_kv_heads=drawn.kv_heads).to(drawn.dtype)
    x = inputs(3, longest + steps).to(drawn.dtype)
    places, lengths = torch.arange(longest), torch.tensor(drawn.lengths)[:, None]
    hidden = places < longest - lengths if drawn.side == "left" else places >= lengths
    cache = layer.cache(3, length=longest + steps if drawn.static else None)
    found = []
    if drawn.side == "left":  # in pieces, of which some rows have nothing
        for at in torch.arange(longest).chunk(drawn.pieces):
            found.append(layer.decode(x[:, at], cache, padding=hidden[:, at]))
    else:
        found.append(layer.decode(x[:, :longest], cache, padding=hidden))
    found += [layer.decode(x[:, i : i + 1], cache) for i in range(longest, longest + steps)]
    out = torch.cat(found, 1)
    shown = torch.cat([~hidden, hidden.new_ones(3, steps)], 1)
    assert not out[~shown].any() and cache.lengths.tolist() == [n + steps for n in drawn.lengths]
    for row in range(3):
        alone = x[row, shown[row]].double()[None]
        bound = TOLERANCE[drawn.dtype] * (
            1 if drawn.dtype == torch.float64 else max(1.0, whole(wide, alone).abs().max())
        )
        torch.testing.assert_close(out[row, shown[row]].double()[None], whole(wide, alone), atol=float(bound), rtol=0)


def test_left_padding_is_that_of_the_layer() -> None:
    layer, x = layer_of("bn+sh"), inputs(2, 17)
    hidden = torch.arange(17) < torch.tensor([[0], [5]])
    expected, _ = layer(x, x, x, key_padding_mask=hidden, is_causal=True, need_weights=False)
    cache = layer.cache(2)
    out = torch.cat([layer.decode(x[:, :9], cache, padding=hidden[:, :9]), layer.decode(x[:, 9:], cache)], 1)
    torch.testing.assert_close(out[~hidden], expected[~hidden], atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", ["bn+sh", "sh-conv1d-causal", "forget-sh", "bn-full+sh", "sh-prefix"])
@pytest.mark.parametrize("static", [False, True])
def test_rows_are_reordered(name: str, static: bool) -> None:
    layer, x = layer_of(PRIMALS[name]), inputs(3, 14)
    cache = layer.cache(3, length=20 if static else None)
    layer.decode(x[:, :11], cache)
    order = torch.tensor([2, 0, 0])
    cache.reorder(order)
    out = torch.cat([layer.decode(x[:, i : i + 1], cache) for i in range(11, 14)], 1)
    mixed = torch.cat([x[order, :11], x[:, 11:]], 1)
    torch.testing.assert_close(out, whole(layer, mixed)[:, 11:], atol=1e-9, rtol=0)


def test_a_prompt_is_expanded_to_beams() -> None:
    layer, x = layer_of("bn+sh"), inputs(2, 9)
    cache = layer.cache(2)
    layer.decode(x, cache)
    cache.expand(3)
    more = inputs(6, 2)
    expected = whole(layer, torch.cat([x.repeat_interleave(3, 0), more], 1))[:, 9:]
    torch.testing.assert_close(layer.decode(more, cache), expected, atol=1e-9, rtol=0)
    with pytest.raises(ValueError, match="keeps its 2 rows; got 4 indices"):
        layer.cache(2, length=8).expand(2)


@pytest.mark.parametrize("name", DECODED)
def test_tokens_are_taken_back(name: str) -> None:
    layer, x = layer_of(PRIMALS[name]), inputs(2, 26)
    expected = whole(layer, torch.cat([x[:, :14], x[:, 19:]], 1))[:, 14:]
    for length in (None, 40):
        cache = layer.cache(2, length=length, rewind=5)
        layer.decode(x[:, :17], cache)
        layer.decode(x[:, 17:18], cache)
        layer.decode(x[:, 18:19], cache)
        cache.crop(14)
        assert cache.lengths.tolist() == [14, 14]
        out = torch.cat([layer.decode(x[:, 19:20], cache), layer.decode(x[:, 20:], cache)], 1)
        torch.testing.assert_close(out, expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize(("rewind", "lengths"), [(6, (7, 11)), (2, (4, 11))])
def test_each_row_is_cropped_to_a_length_of_its_own(rewind: int, lengths: tuple[int, int]) -> None:
    layer, x = layer_of(mechanism("bn+sh", scales=(1, 2, 4, 4, 2, 1))), inputs(2, 15)
    cache = layer.cache(2, rewind=rewind)
    layer.decode(x[:, :12], cache)
    cache.crop(torch.tensor(lengths))
    out = layer.decode(x[:, 12:], cache)
    for row, kept in enumerate(lengths):
        alone = torch.cat([x[row, :kept], x[row, 12:]])[None]
        torch.testing.assert_close(out[row : row + 1], whole(layer, alone)[:, kept:], atol=1e-9, rtol=0)


def test_the_end_of_a_window_of_every_head_is_always_a_way_back() -> None:
    layer, x = layer_of(mechanism("bn+sh", scales=(1, 2, 4, 4, 2, 1))), inputs(1, 21)
    cache = layer.cache(1)
    layer.decode(x[:, :15], cache)
    for refused in (7, 10):
        with pytest.raises(
            UnsupportedError, match=rf"cropping {15 - refused} tokens to {refused} is not exact.*rewind="
        ):
            cache.crop(refused)
        assert cache.lengths.tolist() == [15]
    cache.crop(8)
    out = layer.decode(x[:, 15:], cache)
    expected = whole(layer, torch.cat([x[:, :8], x[:, 15:]], 1))[:, 8:]
    torch.testing.assert_close(out, expected, atol=1e-9, rtol=0)
    cache.crop(0)
    torch.testing.assert_close(layer.decode(x, cache), whole(layer, x), atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", ["conv1d", "forget"])
def test_what_looks_further_back_is_cropped_with_a_rewind_alone(name: str) -> None:
    given = {"causal": True, "size": 3} if name == "conv1d" else {}
    layer, x = layer_of(mechanism(name, **given)), inputs(1, 8)
    cache = layer.cache(1)
    layer.decode(x, cache)
    with pytest.raises(UnsupportedError, match="not kept"):
        cache.crop(6)


def test_scaled_heads_store_less() -> None:
    scales = (1, 1, 2, 2, 4, 4, 8, 8)
    for kv_heads in (8, 4):
        given = {"num_kv_heads": kv_heads, "heads": 8}
        layer = layer_of(mechanism("sh", scales=scales[:: 8 // kv_heads]), **given)
        cache = layer.cache(2, length=4096)
        ratio = cache.bytes / cache.full_bytes
        assert 0.468 < ratio <= 0.48
        full = layer_of("softmax", **given).cache(2, length=4096)
        assert full.full_bytes == cache.full_bytes <= full.bytes < 1.001 * full.full_bytes
    grown = layer_of(mechanism("bn+sh", scales=scales), heads=8).cache(1)
    layer_of(mechanism("bn+sh", scales=scales), heads=8).decode(inputs(1, 5000, width=32), grown)
    assert grown.bytes <= 0.48 * grown.full_bytes and grown.full_bytes < 1.02 * 5000 * 8 * 8 * 8


@pytest.mark.parametrize(
    "name", ["softmax", "bn+sh", "bn-full", "forget-sh", "rotary", "alibi+sh", "gate+sh", "linear"]
)
def test_a_step_of_a_static_cache_compiles_as_one_graph(name: str) -> None:
    layer, x = layer_of(PRIMALS[name]), inputs(2, 16)
    cache = layer.cache(2, length=16)
    found = [layer.decode(x[:, :6], cache)]
    before = {name: t.data_ptr() for held in cache.layers[0].held for name, t in held.tensors.items()}
    with torch.no_grad():
        step = torch.compile(lambda x: layer.decode(x, cache), backend="eager", fullgraph=True)
        found.append(step(x[:, 6:7]))
        with torch._dynamo.config.patch(error_on_recompile=True):
            found += [step(x[:, i : i + 1]) for i in range(7, 16)]
    torch.testing.assert_close(torch.cat(found, 1), whole(layer, x), atol=1e-9, rtol=0)
    assert before == {name: t.data_ptr() for held in cache.layers[0].held for name, t in held.tensors.items()}


def test_a_static_cache_that_is_full_says_so() -> None:
    layer, x = layer_of("sh"), inputs(1, 9)
    cache = layer.cache(1, length=8)
    layer.decode(x[:, :7], cache)
    with pytest.raises(ValueError, match="holds 7 tokens and has room for length=8; 2 more do not fit"):
        layer.decode(x[:, 7:], cache)


def test_bfloat16_is_near_the_whole_in_float64() -> None:
    wide, x = layer_of("bn+sh"), inputs(1, 40).bfloat16()
    layer = layer_of("bn+sh").bfloat16()
    for given in ({}, {"length": 50}):
        out = in_pieces(layer, x, [20, *[1] * 10, 10], **given)
        rounded = layer_of("bn+sh")
        rounded.load_state_dict({n: t.double() for n, t in layer.state_dict().items()})
        error = (out.double() - whole(rounded, x.double())).abs().max() / whole(wide, x.double()).abs().max()
        assert error < 0.02


class Fading(TokenMap):
    def causal_refusal(self):
        return None

    def tokens(self, x, parameters):
        return x.cumsum(2)


class Halved(PositionMap):
    def at(self, x, positions, parameters):
        return x / (1 + positions)[:, None] if positions.dim() == 1 else x / (1 + positions)[:, None, :, None]


class Doubled(Recenter):
    def affine(self, moments, parameters):
        return 2 * moments.mean, None


class Later(DepthwiseConv1d):
    pass


class Some(AllKeys):
    def visible(self, scale, queries, tokens, device):
        return torch.ones(queries, tokens, dtype=torch.bool, device=device).triu(-2)


class Near(Window):
    pass


class Slow(Forget):
    pass


class Squared(Exponential):
    def log_kernel(self, x, y):
        return -(x @ y.transpose(-1, -2)).square()


class Shifted(PointMap):
    needs = "mean"

    def apply(self, x, moments, parameters):
        return (x - moments.mean).tanh()


OWN = {
    "map-of-places": Primal(inputs=(Halved(),), training_set=Pooled((1, 2, 2, 3, 1, 4))),
    "recentring": Primal(inputs=(Doubled(),)), "map-of-points": Primal(Gaussian(), inputs=(Shifted(), BatchNorm())),
    "kernel": Primal(Squared(), inputs=(Recenter(0.5),)),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_methods_of_ones_own_are_called(name: str) -> None:
    layer, x = layer_of(OWN[name]), inputs(2, 13)
    torch.testing.assert_close(in_pieces(layer, x, [5, 1, 1, 4, 2]), whole(layer, x), atol=1e-9, rtol=0)
    hidden = torch.arange(6) < torch.tensor([[0], [2]])
    cache = layer.cache(2)
    out = torch.cat([layer.decode(x[:, :6], cache, padding=hidden), layer.decode(x[:, 6:7], cache)], 1)
    torch.testing.assert_close(out[1:, 2:], whole(layer, x[1:, 2:7]), atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    "primal",
    [Primal(inputs=(Fading(),)), Primal(inputs=(Later(3, causal=True),)), Primal(training_set=Some()),
     Primal(training_set=Sparse(Near(3))), Primal(weights=Slow())],
    ids=lambda p: repr(p)[:60],
)  # fmt: skip
def test_what_says_how_a_sequence_becomes_points_is_refused_where_it_is_ones_own(primal: Primal) -> None:
    with pytest.raises(
        UnsupportedError, match=r"cannot be decoded with a cache.*nothing says what one more token changes"
    ):
        layer_of(primal).cache(1)


@pytest.mark.parametrize(
    "name", ["sh-max", "sh-conv", "sh-kmeans", "conv1d", "conv2d", "sparse-by-length", "linear-bn"]
)
def test_what_has_no_causal_form_is_refused_before_the_first_token(name: str) -> None:
    with pytest.raises(CausalFormError, match="cannot be decoded token by token"):
        layer_of(PRIMALS[name]).cache(1)


def test_layers_that_are_no_causal_self_attention_are_refused() -> None:
    for options, reason in (
        ({"add_bias_kv": True}, "add keys after all tokens"), ({"kdim": 8}, "another input than its queries"),
        ({"projection": ConvProjection(3)}, "see later ones"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=reason):
            layer_of("softmax", **options).cache(1)
    with pytest.raises(UnsupportedError, match="SolvedAttention has a method"):
        SolvedAttention(24, 6, batch_first=True).cache(1)
    layer = MultiheadAttention(24, 6, dropout=0.5, batch_first=True)
    with pytest.raises(ValueError, match=r"call eval\(\)"):
        layer.decode(torch.randn(1, 3, 24), layer.cache(1))


def test_bad_arguments_are_refused_with_what_to_do() -> None:
    layer, x = layer_of("sh"), inputs(2, 4)
    for given in ({"batch": 0}, {"batch": 1, "length": 0}, {"batch": 1, "rewind": -1}):
        with pytest.raises(ValueError, match="a cache takes a"):
            layer.cache(**given)
    with pytest.raises(ValueError, match="cache of 3 rows"):
        layer.decode(x, layer.cache(3))
    with pytest.raises(ValueError, match="at least one new token"):
        layer.decode(x[:, :0], layer.cache(2))
    inside = torch.tensor([[False, True, False, False]] * 2)
    with pytest.raises(ValueError, match="hides tokens between others"):
        layer.decode(x, layer.cache(2), padding=inside)
    with pytest.raises(ValueError, match="padding must be boolean"):
        layer.decode(x, layer.cache(2), padding=inside.float())
    with pytest.raises(UnsupportedError, match="take no place in a cache"):
        layer_of("sh", left_padding=False).decode(x, layer.cache(2), padding=inside)


def test_pooling_of_a_pattern_alone_is_decoded() -> None:
    layer = layer_of(Primal(training_set=Sparse(Fixed(3, 1), Pooled((2,) * 6, prefix=3)), inputs=(BatchNorm(),)))
    x = inputs(2, 20)
    torch.testing.assert_close(in_pieces(layer, x, [2, 5, 1, 1, 1, 10]), whole(layer, x), atol=1e-9, rtol=0)
