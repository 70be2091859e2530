"""Layers whose query heads share keys and values in groups, and the state dicts that they read."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from nn.layers import LAYERS, MASKS, E, H, L, N, make
from nn.test_export import export_serves_every_length
from primaldual import MultiheadAttention, Primal, TransformerEncoderLayer, mechanism
from primaldual.nn import ConvProjection
from primaldual.primal import Pooled, Sparse
from primaldual.regression import diagnose, head_distance

KV = 2
D = E // H


def agreeing(primal: Primal) -> Primal:
    """The same; where it has a scale for every head, with those of the first key/value heads."""
    training_set = primal.training_set
    over = training_set.over if isinstance(training_set, Sparse) else training_set
    if not isinstance(over, Pooled) or over.scales is None:
        return primal
    over = Pooled(over.scales[:KV], over.how, over.prefix, over.grid)
    training_set = Sparse(training_set.pattern, over) if isinstance(training_set, Sparse) else over
    return Primal(primal.features, primal.normalizer, primal.inputs, training_set, primal.bias, primal.residual)


SHARING = {name: agreeing(primal) for name, primal in LAYERS.items()}


def with_every_head(layer: MultiheadAttention) -> MultiheadAttention:
    """A layer without groups that computes the same: its weights, pooling kernels, … written out for each head."""
    whole = make(layer.primal, dropout=layer.dropout, impl="reference")
    with torch.no_grad():
        rows = [layer.weights_of(part) for part in "qkv"]
        each = [1, H // KV, H // KV]

        def written_out(x: Tensor, times: int) -> Tensor:
            return x.unflatten(0, (-1, D)).repeat_interleave(times, 0).flatten(0, 1)

        for n, of in enumerate(("in_proj_weight", "in_proj_bias")):
            getattr(whole, of).copy_(torch.cat([written_out(row[n], r) for row, r in zip(rows, each, strict=True)]))
        whole.out_proj.load_state_dict(layer.out_proj.state_dict())
        for name, x in layer.learned.items():
            every = whole.learned[name]
            every.copy_(x if x.shape == every.shape else x.repeat_interleave(H // KV, 0))
        for name, x in layer.made.named_parameters():
            every = whole.made.get_parameter(name)
            every.copy_(x if x.shape == every.shape else x.repeat_interleave(H // KV, 0))
        if layer.mechanism_bias is not None:
            whole.mechanism_bias.copy_(layer.mechanism_bias)
    return whole


@pytest.mark.parametrize("padding", ["no mask", "float padding"])
@pytest.mark.parametrize("primal", SHARING.values(), ids=SHARING)
def test_a_layer_of_groups_is_the_layer_with_every_head_written_out(primal: Primal, padding: str) -> None:
    layer = make(primal, num_kv_heads=KV)
    whole, x = with_every_head(layer), torch.randn(N, L, E, dtype=torch.float64)
    padding = MASKS[padding]
    found, expected = (a(x, x, x, key_padding_mask=padding, need_weights=False)[0] for a in (layer, whole))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    up = torch.randn_like(found)
    own = torch.autograd.grad(found, layer.weights_of("k")[0], up, retain_graph=True, allow_unused=True)[0]
    gradient = torch.autograd.grad(found, list(layer.parameters()), up)
    assert own is None or own.isfinite().all()
    heads = torch.autograd.grad(expected, whole.in_proj_weight, up)[0]
    of_keys = heads[E : 2 * E].unflatten(0, (KV, H // KV, D)).sum(1).flatten(0, 1)
    named = dict(zip((name for name, _ in layer.named_parameters()), gradient, strict=True))
    torch.testing.assert_close(named["k_proj_weight"], of_keys, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["softmax", "learnable beta", "linear", "sparse", "partly pooled"])
def test_so_it_is_under_causality_with_weights(name: str) -> None:
    primal = {"partly pooled": mechanism("sh")}.get(name) or SHARING[name]
    layer = make(primal, num_kv_heads=KV)
    whole, x = with_every_head(layer), torch.randn(N, L, E, dtype=torch.float64)
    for found, expected in zip(*(a(x, x, x, is_causal=True) for a in (layer, whole)), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_extra_keys_other_widths_and_convolutional_projections_have_groups_too() -> None:
    x, y = torch.randn(2, 5, E), torch.randn(2, 7, 6)
    layer = MultiheadAttention(E, H, batch_first=True, num_kv_heads=1, kdim=6, vdim=6, add_bias_kv=True)
    assert layer.k_proj_weight.shape == (D, 6) and layer.bias_k.shape == (1, 1, D)
    assert layer(x, y, y)[1].shape == (2, 5, 8)
    layer = MultiheadAttention(E, H, batch_first=True, num_kv_heads=2, projection=ConvProjection(3, dims=1))
    assert layer(x, x, x, need_weights=False)[0].shape == x.shape


def test_pooled_groups_are_pooled_before_they_are_projected() -> None:
    x = torch.randn(2, 512, 64)
    grouped = MultiheadAttention(64, 8, batch_first=True, mechanism="sh", num_kv_heads=2)
    whole = MultiheadAttention(64, 8, batch_first=True, mechanism=grouped.primal)
    plan = grouped.plan(x)
    assert plan.route == "pooled" and grouped.primal.training_set.scales == (1, 1, 1, 1, 2, 2, 2, 2)
    assert "not projected in one product" in dict(plan.candidates)["grouped"]
    assert plan.estimates["separate"].flops < whole.plan(x).estimates["separate"].flops
    assert "mechanism='sh', num_kv_heads=2" in repr(grouped)


def test_what_makes_no_groups_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a multiple .* got 4 query heads and 3 key/value heads"):
        MultiheadAttention(E, H, num_kv_heads=3)
    with pytest.raises(ValueError, match=r"one projection of queries and keys.*num_kv_heads=2 and num_heads=4"):
        MultiheadAttention(E, H, num_kv_heads=2, projection="shared")
    with pytest.raises(ValueError, match="share key/value head 0, which is pooled once"):
        MultiheadAttention(E, H, num_kv_heads=2, mechanism=mechanism("sh", scales=(1, 2, 4, 4)))


def outputs_of(layer: nn.Module) -> Tensor:
    x = torch.randn(2, 9, E, generator=torch.Generator().manual_seed(0))
    return layer(x, x, x, need_weights=False)[0]


def loaded(state: Mapping[str, Tensor], **options: object) -> MultiheadAttention:
    layer = MultiheadAttention(E, H, batch_first=True, **options)
    layer.load_state_dict(state)
    return layer


def test_a_state_dict_comes_back_and_has_the_names_and_sizes_that_are_documented() -> None:
    layer = MultiheadAttention(E, H, batch_first=True, num_kv_heads=KV)
    shapes = {name: tuple(x.shape) for name, x in layer.state_dict().items()}
    assert shapes == {
        "q_proj_weight": (E, E), "k_proj_weight": (KV * D, E), "v_proj_weight": (KV * D, E),
        "in_proj_bias": (E + 2 * KV * D,), "out_proj.weight": (E, E), "out_proj.bias": (E,),
    }  # fmt: skip
    torch.testing.assert_close(outputs_of(loaded(layer.state_dict(), num_kv_heads=KV)), outputs_of(layer))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kv", [2, 4])
def test_one_linear_map_for_each_projection_is_read(kv: int, bias: bool) -> None:
    maps = {"q_proj": (E, E), "k_proj": (kv * D, E), "v_proj": (kv * D, E), "o_proj": (E, E)}
    linear = nn.ModuleDict({name: nn.Linear(e, rows, bias=bias) for name, (rows, e) in maps.items()})
    layer = loaded(linear.state_dict(), num_kv_heads=kv, bias=bias)
    x = torch.randn(2, 9, E, generator=torch.Generator().manual_seed(0))
    q, k, v = (linear[f"{part}_proj"](x).unflatten(-1, (-1, D)).transpose(1, 2) for part in "qkv")
    heads = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(outputs_of(layer), linear["o_proj"](heads.transpose(1, 2).flatten(2)))


def test_heads_that_are_repeated_in_a_checkpoint_are_read_as_one_and_the_other_way_round() -> None:
    few = MultiheadAttention(E, H, batch_first=True, num_kv_heads=KV)
    nn.init.normal_(few.in_proj_bias)
    every = loaded(few.state_dict())  # each head serves a group of the layer's
    assert every.in_proj_weight.shape == (3 * E, E)
    torch.testing.assert_close(outputs_of(every), outputs_of(few))
    torch.testing.assert_close(outputs_of(loaded(every.state_dict(), num_kv_heads=KV)), outputs_of(few))
    torch_layer = nn.MultiheadAttention(E, H, batch_first=True)
    torch_layer.load_state_dict(every.state_dict())
    torch.testing.assert_close(outputs_of(torch_layer), outputs_of(few))


def test_heads_of_a_group_that_differ_are_not_taken_for_one() -> None:
    state = nn.MultiheadAttention(E, H).state_dict()
    kept = {name: x.clone() for name, x in state.items()}
    with pytest.raises(RuntimeError, match=r"k_proj: 4 key/value heads do not fit .*num_kv_heads=2.*differ.*average"):
        loaded(state, num_kv_heads=KV)
    assert all(torch.equal(x, kept[name]) for name, x in state.items())


def test_a_state_dict_of_another_width_is_torchs_error_with_the_sizes_as_they_are() -> None:
    with pytest.raises(RuntimeError, match=r"in_proj_weight: copying a param with shape torch.Size\(\[24, 8\]\)"):
        loaded(nn.MultiheadAttention(8, H).state_dict())


def test_an_encoder_layer_has_groups_inside_torchs_encoder_and_its_state_dict() -> None:
    layer = TransformerEncoderLayer(E, H, 32, batch_first=True, num_kv_heads=1, mechanism="bn+sh")
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    again = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    again.load_state_dict(encoder.state_dict())
    x = torch.randn(2, 9, E)
    torch.testing.assert_close(again(x), encoder(x))
    assert encoder.state_dict()["layers.0.self_attn.k_proj_weight"].shape == (D, E)


@pytest.mark.parametrize(("name", "causal"), [("bn+sh", False), ("softmax", True)])
def test_one_exported_program_serves_every_length(name: str, causal: bool) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = MultiheadAttention(E, H, batch_first=True, mechanism=name, num_kv_heads=KV)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
            return self.layer(x, x, x, need_weights=False, is_causal=causal)

    export_serves_every_length(Layer())


def test_every_query_head_is_diagnosed_on_the_keys_of_its_group() -> None:
    layer = MultiheadAttention(E, H, batch_first=True, num_kv_heads=KV, mechanism="bn+sh")
    x = torch.randn(1, 12, E)
    rows = diagnose(layer, (x, x, x)).rows
    assert [row.scale for row in rows] == [1, 1, 2, 2]
    assert rows[0].effective_rank == rows[1].effective_rank != rows[2].effective_rank
    found = head_distance(layer, (x, x, x)).layers[0].repeated
    assert found.shape == (1, H, H) and found[0, 0, 1] > 0  # their queries differ
