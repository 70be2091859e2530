"""Distances between the attention maps of heads: the definition, the two ways for pooled heads, and what is printed."""

import json
import math
import sys

import pytest
import torch
from torch import Tensor, nn

from primaldual import MultiheadAttention, Primal, TransformerEncoderLayer, attention, mechanism, mechanisms
from primaldual.models import SequenceClassifier, SequenceConfig
from primaldual.primal import Pooled
from primaldual.regression import HeadDistances, LayerDistances, NoAttentionError, distance, head_distance, maps
from primaldual.regression.calls import attention_calls
from support.watch import Watch

E, H, N = 16, 4, 9
PADDING = torch.arange(N) >= torch.tensor([[N], [6], [4]])
SEVERAL = ("softmax", "bn", "bn+sh", "conv1d", "linear-sh", "sparse-bn+sh")


class Stack(nn.Module):
    """Encoder layers of several mechanisms, one after the other."""

    def __init__(self, *primals: str | Primal, heads: int = H) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            TransformerEncoderLayer(E, heads, 32, batch_first=True, dtype=torch.float64, mechanism=p) for p in primals
        )

    def forward(self, x, padding=None):
        for block in self.blocks:
            x = block(x, src_key_padding_mask=padding)
        return x


def series(batch: int = 3, length: int = N) -> Tensor:
    return torch.randn(batch, length, E, dtype=torch.float64)


def both(found: HeadDistances) -> list[Tensor | None]:
    return [part for layer in found.layers for part in (layer.shared, layer.repeated)]


def test_the_distance_is_the_l2_norm_of_the_difference_of_whole_maps():
    layer = MultiheadAttention(4, 2, batch_first=True)
    first = torch.full((3, 3), -torch.inf).fill_diagonal_(0.0)  # every query sees itself
    second = torch.full((3, 3), -torch.inf)
    second[:, 0] = 0.0  # every query sees the first key
    found = head_distance(layer, {n: torch.randn(1, 3, 4) for n in ("query", "key", "value")} | {
        "attn_mask": torch.stack([first, second])
    })  # fmt: skip
    (only,) = found.layers
    for measured in (only.shared, only.repeated):
        torch.testing.assert_close(measured, torch.tensor([[[0.0, 2.0], [2.0, 0.0]]]).double())  # rows: 0, √2, √2
    assert found.shared == (pytest.approx(2.0), None, None) and (only.layer, only.call) == ("MultiheadAttention", 0)


@pytest.mark.parametrize("name", mechanisms())
def test_distances_are_those_of_the_reference_s_weights(name):
    model, x = Stack(mechanism(name, **({"stride": 3} if "sparse" in name else {}))), series()
    (call,) = attention_calls(model, (x, PADDING))
    _, weights = attention(
        call.queries, call.keys, call.values, call.primal, key_padding_mask=PADDING, query_padding_mask=PADDING,
        parameters=call.parameters, impl="reference", need_weights=True,
    )  # fmt: skip
    valid = (~PADDING).double()
    window = torch.arange(N) // torch.tensor(call.primal.training_set.head_scales(H))[:, None]  # [H, S]
    alike = (window[:, :, None] == window[:, None]).double()
    whole = weights * torch.einsum("hst,bt->bhs", alike, valid).unsqueeze(2)
    (found,) = head_distance(model, (x, PADDING)).layers
    for measured, maps_ in ((found.shared, weights), (found.repeated, whole)):
        maps_ = maps_ * valid[:, None, :, None]
        differences = maps_.unsqueeze(2) - maps_.unsqueeze(1)
        torch.testing.assert_close(measured, differences.square().sum((-1, -2)).sqrt())


def pointed(name: str) -> MultiheadAttention:
    """Head 0 looks at token 0, head 1 at token 2; tokens are told apart by their first four channels."""
    layer = MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64, mechanism=name)
    with torch.no_grad():
        layer.in_proj_weight.zero_()
        layer.in_proj_weight[8:12, :4] = layer.in_proj_weight[12:16, :4] = torch.eye(4)
        layer.in_proj_bias[0] = layer.in_proj_bias[4 + 2] = 400.0
    return layer


def test_a_shared_window_brings_heads_closer_and_a_repeated_one_further_apart():
    x = torch.eye(4, 8, dtype=torch.float64)[None]
    alone = head_distance(pointed("softmax"), (x, x, x))
    assert alone.shared.mean == alone.repeated.mean == pytest.approx(2 * math.sqrt(2))  # (1, 0, −1, 0) in four rows
    pooled = head_distance(pointed("sh"), (x, x, x))
    assert pooled.shared.mean == pytest.approx(2 * math.sqrt(1.5))  # (1, 0, −½, −½)
    assert pooled.repeated.mean == pytest.approx(2 * math.sqrt(3))  # (1, 0, −1, −1)


def test_heads_that_look_everywhere_alike_differ_by_their_scales_where_weights_are_repeated():
    layer, x = MultiheadAttention(4, 4, mechanism=Primal(training_set=Pooled((1, 1, 2, 4)))), torch.zeros(8, 1, 4)
    found = head_distance(layer, (x, x, x)).layers[0]
    scales = torch.tensor([1.0, 1.0, 2.0, 4.0], dtype=torch.float64)
    torch.testing.assert_close(found.shared, torch.zeros(1, 4, 4, dtype=torch.float64))
    torch.testing.assert_close(found.repeated[0], (scales[:, None] - scales).abs())


def test_padding_takes_no_part_so_a_padded_batch_has_the_distances_of_its_sequences():
    model, x = Stack(*SEVERAL), series()
    together = both(head_distance(model, (x.masked_fill(PADDING[..., None], 9.0), PADDING)))
    alone = [both(head_distance(model, x[i : i + 1, : int((~PADDING[i]).sum())])) for i in range(3)]
    for batch, *each in zip(together, *alone, strict=True):
        torch.testing.assert_close(batch, torch.cat(each))


@pytest.mark.parametrize("at_once", [1, 2 * H * N, 2 * H * N * N], ids=["a query", "two queries", "two cases"])
def test_it_does_not_matter_how_much_is_held_at_once(at_once, monkeypatch):
    model, x = Stack(*SEVERAL), series()
    wanted = both(head_distance(model, (x, PADDING)))
    for module in (maps, distance):
        monkeypatch.setattr(module, "AT_ONCE", at_once)
    for found, want in zip(both(head_distance(model, (x, PADDING))), wanted, strict=True):
        torch.testing.assert_close(found, want)


@pytest.mark.parametrize("name", ["softmax", "bn+sh", "linear-sh"])
def test_no_more_than_that_is_held(name, monkeypatch):
    layer, x, limit = MultiheadAttention(E, H, batch_first=True, mechanism=name), torch.randn(3, 256, E), 1 << 16
    for module in (maps, distance):
        monkeypatch.setattr(module, "AT_ONCE", limit)
    (call,) = attention_calls(layer, (x, x, x))
    for pooling in ("shared", "repeated"):
        with Watch() as watch:
            distance._distances(call, pooling)
        assert watch.largest <= 4 * limit < 4 * H * 256 * 256


@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_encoder_has_the_distances_of_ours_with_the_same_weights(batch_first):
    options = {"dim_feedforward": 32, "batch_first": batch_first, "dtype": torch.float64}
    theirs = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, **options), 2, enable_nested_tensor=batch_first)
    ours = nn.TransformerEncoder(TransformerEncoderLayer(E, H, **options), 2, enable_nested_tensor=False)
    ours.load_state_dict(theirs.state_dict())
    batch = {"src": series() if batch_first else series().transpose(0, 1), "src_key_padding_mask": PADDING}
    a, b = head_distance(theirs, batch), head_distance(ours, batch)
    assert list(a.named()) == list(b.named()) == ["layers.0.self_attn", "layers.1.self_attn"]
    for found, want in zip(both(a), both(b), strict=True):
        torch.testing.assert_close(found, want)


def test_each_document_of_a_pair_is_a_case():
    config = SequenceConfig(length=32, outputs=2, pairs=True, mechanism="bn+sh")
    model, tokens = SequenceClassifier(config), torch.randint(1, 100, (3, 2, 30))
    padding = torch.arange(30) >= torch.tensor([[30, 11], [17, 30], [4, 25]])[..., None]

    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens, padding):
            return self.model.encode(tokens, padding)

    pairs = both(head_distance(model, (tokens, padding)))
    for found, want in zip(
        pairs, both(head_distance(Alone(), (tokens.flatten(0, 1), padding.flatten(0, 1)))), strict=True
    ):
        assert found.shape == (6, 2, 2)
        torch.testing.assert_close(found, want)


def test_heads_that_come_to_be_the_same_are_no_distance_apart():
    model = Stack("bn")
    weight = model.blocks[0].self_attn.in_proj_weight
    with torch.no_grad():
        for part in (0, E):  # of queries, of keys
            weight[part + 4 : part + 8] = weight[part : part + 4]
    (found,) = head_distance(model, series()).layers
    assert found.shared[:, 0, 1].max() == 0.0 and found.shared[:, 0, 2].min() > 0.01


@pytest.mark.parametrize("how", ["max", "conv"])
def test_where_there_is_no_weight_to_share_it_says_so_and_repeats(how):
    found = head_distance(Stack("bn", mechanism("sh", how=how)), series())
    assert found.shared is None and found.layers[0].shared is not None and found.layers[1].shared is None
    assert found.layers[1].note == f"not shared: {how} pooling has no weights over tokens"
    assert found.repeated.mean > 0
    assert f"blocks.1.self_attn: {found.layers[1].note}" in str(found) and "–" in str(found)
    assert found.to_dict()["shared"] is None and found.to_dict()["layers"][1]["shared"] is None


def test_layers_of_one_head_are_left_out():
    one, two = Stack("softmax", heads=1), Stack("softmax")
    assert len(head_distance(nn.Sequential(one, two), series()).layers) == 1
    with pytest.raises(ValueError, match="Stack has attention layers of one head only; a distance takes two"):
        head_distance(one, series())
    with pytest.raises(NoAttentionError, match="Linear has no attention layer"):
        head_distance(nn.Linear(E, E), series())


def test_a_sequence_without_a_token_is_left_out():
    padding = PADDING.clone()
    padding[0] = True
    model, x = Stack("bn+sh"), series()
    (found,) = head_distance(model, (x, padding)).layers
    torch.testing.assert_close(found.repeated, head_distance(model, (x[1:], PADDING[1:])).layers[0].repeated)
    with pytest.raises(ValueError, match=r"self_attn: no sequence of the batch has a token that is not padding"):
        head_distance(model, (x, torch.ones_like(padding)))


def test_the_calls_of_a_shared_module_are_layers():
    block = Stack("bn")
    found = head_distance(nn.Sequential(block, block), series())
    assert list(found.named()) == [f"0.blocks.0.self_attn, call {call}" for call in range(2)]


def by_hand() -> HeadDistances:
    """Three heads in the first layer and two in the second, two cases."""
    first, second = torch.zeros(2, 3, 3, dtype=torch.float64), torch.zeros(2, 2, 2, dtype=torch.float64)
    for layer, pairs in ((first, [(0, 1), (0, 2), (1, 2)]), (second, [(0, 1)])):
        for place, (g, h) in enumerate(pairs):
            for case in range(2):
                layer[case, g, h] = layer[case, h, g] = 1.0 + place + 3 * case
    return HeadDistances(
        (LayerDistances("a", 0, (1, 1, 1), first, first), LayerDistances("b", 0, (1, 2), second, 2 * second))
    )


def test_averages_are_over_cases_and_pairs_then_over_layers():
    found = by_hand()
    mean, std, within = found.shared  # 1 … 6 in the first layer, 1 and 4 in the second
    assert (mean, std) == (pytest.approx(3.0), pytest.approx(math.sqrt(0.5)))
    assert within == pytest.approx((math.sqrt(3.5) + math.sqrt(4.5)) / 2)
    assert found.repeated.mean == pytest.approx((3.5 + 5.0) / 2)
    assert repr(found) == "HeadDistances(layers=2, shared=3.000 ± 0.707, repeated=4.250 ± 1.061)"


def test_the_table_fits_a_terminal():
    text = str(by_hand())
    assert (
        text
        == """\
       L2 distance between the attention maps of two heads

 layer       heads  scales  cases         shared       repeated
 ───────────────────────────────────────────────────────────────
 a               3       1      2  3.500 ± 1.871  3.500 ± 1.871
 b               2    1, 2      2  2.500 ± 2.121  5.000 ± 4.243

 all layers                        3.000 ± 0.707  4.250 ± 1.061

mean ± standard deviation: of a layer over pairs of heads and
cases, then over layers"""
    )
    (layer,) = by_hand().layers[:1]
    deep = HeadDistances(tuple(layer._replace(layer=f"model.encoder.layers.{i}.attention.self") for i in range(12)))
    assert max(map(len, str(deep).splitlines())) <= 80


def test_what_is_found_is_plain_json():
    found = by_hand().to_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["layers"][1]["repeated"]["heads"] == [[0.0, 5.0], [5.0, 0.0]]
    assert found["shared"]["mean"] == 3.0 and found["layers"][0]["cases"] == 2


@pytest.mark.parametrize("layers", [slice(0, 1), slice(1, 2), slice(2, 3)], ids=["unpooled", "pooled", "not shared"])
def test_the_plot_is_a_picture(layers):
    pytest.importorskip("matplotlib")
    first, second = by_hand().layers
    found = HeadDistances((first, second, second._replace(shared=None, note="not shared"))[layers])
    assert found.plot().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_names_what_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r'matplotlib: pip install "primaldual\[demo\]"'):
        by_hand().plot()
