"""Rotary positions: an orthogonal map for each place, which mixes no tokens."""

import math

import pytest
import torch

from primaldual import MultiheadAttention, Primal, attention, mechanism
from primaldual.primal import DepthwiseConv1d, EluPlusOne, Pooled, PositionMap, RmsNorm, Rotary

TIGHT = {"rtol": 1e-12, "atol": 1e-12}
ROTARY = Primal(inputs=(Rotary(base=50.0),))


def tokens(length: int = 9, dim: int = 6, heads: int = 2) -> torch.Tensor:
    return torch.randn(2, heads, length, dim, dtype=torch.float64)


def test_each_pair_of_channels_turns_by_its_own_angle():
    x, base = tokens(5, 7), 50.0
    expected = x.clone()
    for i in range(5):
        for c in range(2):  # of 7 channels 4 are rotated
            angle = i * base ** (-2 * c / 4)
            turn = torch.tensor(
                [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=x.dtype
            )
            expected[:, :, i, [c, c + 2]] = x[:, :, i, [c, c + 2]] @ turn.T
    torch.testing.assert_close(Rotary(base, fraction=0.6).tokens(x, {}), expected, **TIGHT)


def test_it_keeps_lengths_and_leaves_the_token_at_zero_as_it_is():
    x = tokens()
    turned = Rotary().tokens(x, {})
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), **TIGHT)
    assert torch.equal(turned[:, :, 0], x[:, :, 0]) and not torch.allclose(turned[:, :, 1], x[:, :, 1])


def test_the_score_depends_on_the_distance_alone():
    q, k, map_ = tokens(1), tokens(1), Rotary()
    at = [torch.tensor([i]) for i in (3, 8, 103, 108)]
    near = (map_.at(q, at[0], {}) * map_.at(k, at[1], {})).sum(-1)
    far = (map_.at(q, at[2], {}) * map_.at(k, at[3], {})).sum(-1)
    torch.testing.assert_close(near, far, rtol=1e-11, atol=1e-11)
    assert not torch.allclose(near, (map_.at(q, at[0], {}) * map_.at(k, at[2], {})).sum(-1))


def test_rows_of_a_batch_may_stand_at_places_of_their_own():
    x, map_ = tokens(4), Rotary()
    places = torch.tensor([[0, 1, 2, 3], [5, 6, 7, 9]])
    found = map_.at(x, places, {})
    for row in range(2):
        assert torch.equal(found[row : row + 1], map_.at(x[row : row + 1], places[row], {}))


def test_a_pooled_key_is_the_mean_of_rotated_ones_and_values_are_not_rotated():
    q, k, v = tokens(8), tokens(8), tokens(8)
    rotated_q, rotated_k = (Rotary(50.0).tokens(x, {}) for x in (q, k))
    means = (x.unflatten(2, (4, 2)).mean(3) for x in (rotated_k, v))
    expected = attention(rotated_q, *means, "softmax")
    primal = Primal(inputs=ROTARY.inputs, training_set=Pooled((2, 2)))
    torch.testing.assert_close(attention(q, k, v, primal), expected, **TIGHT)


@pytest.mark.parametrize("impl", ["reference", "auto"])
def test_a_mask_for_each_query_hides_what_it_hides_and_no_more(impl):
    q, k, v = tokens(), tokens(), tokens()
    mask = torch.rand(9, 9) < 0.4
    mask[:, 0] = False
    changed = [x.clone() for x in (k, v)]
    for x in changed:
        x[:, :, 4] = 9.0
    before, after = (attention(q, *kv, ROTARY, attn_mask=mask, impl=impl) for kv in ((k, v), changed))
    assert torch.equal(before[:, :, mask[:, 4]], after[:, :, mask[:, 4]])
    assert not torch.allclose(before[:, :, ~mask[:, 4]], after[:, :, ~mask[:, 4]])


def test_it_is_causal_and_a_step_of_decoding_is_the_last_row():
    q, k, v = tokens(), tokens(), tokens()
    for primal in (ROTARY, mechanism("bn+sh", rotary=True, scales=(1, 4))):
        whole = attention(q, k, v, primal, is_causal=True)
        last = attention(q[:, :, 8:], k, v, primal, is_causal=True, query_offset=8)
        torch.testing.assert_close(last, whole[:, :, 8:], **TIGHT)
        early = attention(q[:, :, :5], k[:, :, :5], v[:, :, :5], primal, is_causal=True)
        torch.testing.assert_close(early, whole[:, :, :5], **TIGHT)


def test_where_the_sequence_begins_is_told_apart_only_by_what_rotation_does_not_leave():
    """Softmax and re-centring see distances; a gain for each channel and a finite Φ see places."""
    q, k, v = tokens(), tokens(), tokens()
    gain = {"gain": torch.linspace(0.5, 2.0, 6, dtype=torch.float64)}
    blank = torch.zeros(2, 3, dtype=torch.bool), torch.zeros(2, 9, dtype=torch.bool)
    hidden = torch.cat([~blank[0], blank[1]], dim=1)
    later = [torch.cat([torch.zeros_like(x[:, :, :3]), x], dim=2) for x in (k, v)]

    def moved(primal: Primal, parameters: dict) -> bool:
        here = attention(q, k, v, primal, parameters=parameters)
        there = attention(
            q, *later, primal, key_padding_mask=hidden, query_offset=3, parameters=parameters, left_padding=False
        )
        return not torch.allclose(here, there, rtol=1e-9, atol=1e-9)

    assert not moved(ROTARY, {}) and not moved(mechanism("bn", rotary=True), {})
    assert moved(Primal(inputs=(Rotary(50.0), RmsNorm())), gain)
    assert moved(Primal(EluPlusOne(), inputs=(Rotary(50.0),)), {})


def test_far_places_keep_their_digits_in_low_precision():
    q, k = (tokens(1).float() for _ in range(2))
    far = [torch.tensor([100_003]), torch.tensor([100_000])]
    exact = [Rotary().at(x.double(), at, {}) for x, at in zip((q, k), far, strict=True)]
    for x, at, truth in zip((q, k), far, exact, strict=True):
        # three roundings of numbers no larger than the token
        assert (Rotary().at(x, at, {}) - truth).abs().max() < 3 * torch.finfo(torch.float32).eps * x.abs().max()


def test_a_layer_learns_nothing_for_it_and_takes_a_torch_state_dict():
    theirs = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    layer = MultiheadAttention(16, 4, batch_first=True, mechanism=mechanism("softmax", rotary=True))
    layer.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 7, 16)
    assert not torch.allclose(layer(x, x, x)[0], theirs(x, x, x)[0])


def test_a_map_of_one_s_own_that_knows_places_mixes_no_tokens():
    class Ramp(PositionMap):
        def at(self, x, positions, parameters):
            return x * (1 + positions.to(x.dtype))[:, None]

    q, k, v = tokens(), tokens(), tokens()
    primal = Primal(inputs=(Ramp(),))
    ramp = torch.arange(1, 10, dtype=torch.float64)[:, None]
    expected = attention(q[:, :, 4:] * ramp[4:], k * ramp, v, "softmax", is_causal=True, query_offset=4)
    found = attention(q[:, :, 4:], k, v, primal, is_causal=True, query_offset=4)
    torch.testing.assert_close(found, expected, **TIGHT)
    assert primal.mixing_maps == () and Primal(inputs=(DepthwiseConv1d(), Ramp())).mixing_maps == (DepthwiseConv1d(),)


@pytest.mark.parametrize(
    "given", [{"base": 0.0}, {"base": math.inf}, {"base": "1"}, {"fraction": 0}, {"fraction": 1.5}]
)
def test_numbers_out_of_range_are_refused(given):
    with pytest.raises(ValueError, match=f"Rotary: {next(iter(given))} must be"):
        Rotary(**given)


def test_a_head_without_a_pair_to_rotate_is_refused():
    with pytest.raises(ValueError, match=r"there is none in a share of 0\.25 of 6; give a larger fraction"):
        attention(tokens(), tokens(), tokens(), Primal(inputs=(Rotary(fraction=0.25),)))
