"""The exponential kernel times a kernel of positions, exp(−m|i − j|)."""

import math

import pytest
import torch

from primaldual import MultiheadAttention, Primal, attention, derive, mechanism
from primaldual.ops import UnsupportedError
from primaldual.primal import AllKeys, EluPlusOne, Laplace, Points, Pooled, Recenter, Sparse, TrainingSet, Unit, Window
from primaldual.regression import fit
from primaldual.svr.design import design
from support.battery import relative_error

TIGHT = {"rtol": 1e-12, "atol": 1e-12}
SLOPES = (0.5, 0.0, 0.2)


def tokens(length: int = 9, dim: int = 4, heads: int = 3) -> torch.Tensor:
    return torch.randn(2, heads, length, dim, dtype=torch.float64)


def distances(queries: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """−m|i − j|: [heads, L, W]."""
    slopes = torch.tensor(SLOPES, dtype=torch.float64)[:, None, None]
    return -slopes * (queries.double()[:, None] - points.double()).abs()


@pytest.mark.parametrize("impl", ["reference", "sdpa", "dense"])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_a_score_loses_its_slope_for_each_token_between(impl, causal):
    q, k, v = tokens(5), tokens(), tokens()
    scores = q @ k.mT / 2 + distances(torch.arange(3, 8), torch.arange(9))
    if causal:
        scores = scores.masked_fill(torch.ones(5, 9, dtype=torch.bool).triu(4), -torch.inf)
    found = attention(q, k, v, Primal(features=Laplace(SLOPES)), is_causal=causal, query_offset=3, impl=impl)
    torch.testing.assert_close(found, scores.softmax(-1) @ v, **TIGHT)


@pytest.mark.parametrize("impl", ["reference", "sdpa", "dense"])
@pytest.mark.parametrize("how", ["mean", "max"])
def test_a_pooled_point_stands_at_the_mean_position_of_its_tokens(impl, how):
    q, k, v = tokens(), tokens(), tokens()
    hidden = torch.zeros(2, 9, dtype=torch.bool)
    hidden[:, [1, 4, 5]] = True
    primal = Primal(features=Laplace(SLOPES), training_set=Pooled((2, 2, 2), how=how))
    found = attention(q, k, v, primal, key_padding_mask=hidden, impl=impl)
    # windows 0 1 | 2 3 | 4 5 | 6 7 | 8, of which 1, 4 and 5 are hidden
    pairs = [[0], [2, 3], [6, 7], [8]]
    places = torch.tensor([0.0, 2.5, 6.5, 8.0])
    reduce = (lambda x: x.mean(2)) if how == "mean" else (lambda x: x.amax(2))
    keys, values = (torch.stack([reduce(x[:, :, pair]) for pair in pairs], dim=2) for x in (k, v))
    scores = q @ keys.mT / 2 + distances(torch.arange(9), places)
    torch.testing.assert_close(found, scores.softmax(-1) @ values, **TIGHT)


@pytest.mark.parametrize("impl", ["reference", "dense"])
def test_the_running_window_of_a_causal_head_stands_at_the_mean_of_what_is_seen(impl):
    q, k, v = tokens(), tokens(), tokens()
    primal = Primal(features=Laplace(SLOPES), training_set=Pooled((4, 4, 4)))
    found = attention(q, k, v, primal, is_causal=True, impl=impl)
    for i in range(9):
        parts = [list(range(w, min(w + 4, i + 1))) for w in range(0, i + 1, 4)]
        keys, values = (torch.stack([x[:, :, part].mean(2) for part in parts], dim=2) for x in (k, v))
        places = torch.tensor([sum(part) / len(part) for part in parts])
        scores = q[:, :, i : i + 1] @ keys.mT / 2 + distances(torch.tensor([i]), places)
        torch.testing.assert_close(found[:, :, i : i + 1], scores.softmax(-1) @ values, **TIGHT)


def test_under_causality_it_is_a_weight_of_each_key():
    q, k, v = tokens(heads=1), tokens(heads=1), tokens(heads=1)
    bias = 0.3 * torch.arange(9, dtype=torch.float64).expand(2, -1)
    expected = attention(q, k, v, "softmax", is_causal=True, key_padding_mask=bias)
    found = attention(q, k, v, Primal(features=Laplace((0.3,))), is_causal=True)
    torch.testing.assert_close(found, expected, **TIGHT)


def test_with_unit_normalisation_distances_are_kept_as_they_are():
    q, k, v = tokens(), tokens(), tokens()
    expected = (q @ k.mT / 2 + distances(torch.arange(9), torch.arange(9))).exp() @ v
    for impl in ("reference", "dense"):
        found = attention(q, k, v, Primal(features=Laplace(SLOPES), normalizer=Unit()), impl=impl)
        torch.testing.assert_close(found, expected, **TIGHT)


def test_without_slopes_they_are_those_of_alibi():
    # Press et al., 2022: 1/2 … 1/256 for 8 heads
    slopes = [Laplace().of_heads(heads)["slopes"].tolist() for heads in (8, 16, 12)]
    assert slopes[0] == [2.0**-h for h in range(1, 9)]
    assert slopes[1][:2] == [2**-0.5, 0.5] and slopes[2] == slopes[0] + slopes[1][0:8:2]
    q, k, v = tokens(heads=4), tokens(heads=4), tokens(heads=4)
    assert torch.equal(
        attention(q, k, v, "alibi"), attention(q, k, v, mechanism("alibi", slopes=(2**-2, 2**-4, 2**-6, 2**-8)))
    )


def test_slopes_of_zero_are_softmax_and_every_part_goes_with_it():
    q, k, v = tokens(), tokens(), tokens()
    for inputs in ((), (Recenter(0.5),)):
        for training_set in (AllKeys(), Pooled((1, 2, 4)), Sparse(Window(2))):
            flat = Primal(features=Laplace((0, 0, 0)), inputs=inputs, training_set=training_set)
            plain = Primal(inputs=inputs, training_set=training_set)
            torch.testing.assert_close(attention(q, k, v, flat), attention(q, k, v, plain), **TIGHT)


def test_far_keys_keep_their_differences_in_16_bits():
    """Only keys 200 and 204 before the last query are left; their biases would be equal in bfloat16."""
    q, k, v = (tokens(300, heads=3)[:1] for _ in range(3))
    q, k, v = (x.bfloat16() for x in (q, k, v))
    hidden = torch.ones(1, 300, dtype=torch.bool)
    hidden[:, [95, 99]] = False
    primal = Primal(features=Laplace(SLOPES))
    truth = attention(q.double(), k.double(), v.double(), primal, key_padding_mask=hidden)[:, :, 299:]
    for impl in ("sdpa", "dense"):
        found = attention(q, k, v, primal, key_padding_mask=hidden, impl=impl)[:, :, 299:]
        assert relative_error(found, truth) < 12 * torch.finfo(torch.bfloat16).eps / 2


def test_its_regression_is_one_of_positions_and_points():
    """K_ij is the kernel of points times that of positions, and predictions count from the offset."""
    keys, targets = tokens(7)[:1], tokens(7)[:1]
    primal = Primal(features=Laplace(SLOPES), training_set=Pooled((2, 1, 2)))
    made = design(primal, keys, targets, None, None, False, {})
    points = torch.tensor([0.5, 2.5, 4.5, 6.0])
    torch.testing.assert_close(made.places[0, 0, :4], points.double())
    log_kernel = made.keys[0, 0, :4] @ made.keys[0, 0, :4].mT / 2 + distances(points, points)[0]
    log_h = log_kernel.logsumexp(-1)
    found = made.kernel[0, 0, :4, :4].log() + made.log_scale[0, 0]
    torch.testing.assert_close(found, log_kernel - log_h - log_h[:, None], **TIGHT)
    solved = fit(primal, keys, targets, C=1e3, epsilon=0.1)
    assert solved.certificate.ok(1e-10)
    x = tokens(7)[:1]
    torch.testing.assert_close(solved.predict(x[:, :, 3:], query_offset=3), solved.predict(x)[:, :, 3:], **TIGHT)
    assert not torch.allclose(solved.predict(x[:, :, 3:]), solved.predict(x)[:, :, 3:])


class Steeper(Laplace):
    """Not what `Laplace` is taken for."""

    def log_positions(self, queries, points, parameters):
        return 2 * super().log_positions(queries, points, parameters)


class Steps(EluPlusOne):
    """A finite Φ, and a kernel of positions for one's own."""

    def log_positions(self, queries, points, parameters):
        return -0.1 * (queries - points).square()


def test_a_kernel_of_positions_of_one_s_own_is_computed_by_the_definition():
    q, k, v = tokens(), tokens(), tokens()
    twice = Primal(features=Laplace(tuple(2 * m for m in SLOPES)))
    torch.testing.assert_close(attention(q, k, v, Primal(features=Steeper(SLOPES))), attention(q, k, v, twice), **TIGHT)
    i = torch.arange(9, dtype=torch.float64)
    kernel = Steps().kernel(q, k) * (-0.1 * (i[:, None] - i).square()).exp()
    expected = kernel @ v / kernel.sum(-1, keepdim=True)
    torch.testing.assert_close(attention(q, k, v, Primal(features=Steps())), expected, **TIGHT)
    for primal in (Primal(features=Steeper(SLOPES)), Primal(features=Steps())):
        for impl in ("sdpa", "dense", "linear"):
            with pytest.raises(UnsupportedError):
                attention(q, k, v, primal, impl=impl)


def test_points_that_do_not_say_what_they_are_made_of_are_refused():
    class Alternate(TrainingSet):
        def reduce(self, keys, values, seen, scale, parameters):
            return Points(keys[:, :, None, ::2], values[:, :, None, ::2], seen[..., ::2], None)

        def points(self, scale, tokens):
            return -(-tokens // 2)

    with pytest.raises(UnsupportedError, match="does not say of which tokens its points are made"):
        attention(tokens(), tokens(), tokens(), Primal(features=Laplace(SLOPES), training_set=Alternate()))


def test_a_layer_learns_nothing_for_it_and_its_keys_are_not_pooled_before_the_projection():
    layer = MultiheadAttention(
        12, 3, batch_first=True, mechanism=mechanism("alibi+sh", slopes=SLOPES, scales=(1, 2, 4))
    )
    layer.load_state_dict(torch.nn.MultiheadAttention(12, 3).state_dict())
    assert layer.plan(torch.randn(2, 9, 12)).route == "separate"


def test_the_derivation_says_what_distances_do():
    said = derive(Primal(features=Laplace(), inputs=(Recenter(),))).explain()
    assert "softmax_j([q_i − μ]·[k_j − μ]/√D − m|i − j|)" in said
    assert "softmax_j([q_i − μ]·k_j/√D − m|i − j|)" in said and "2^(−8h/H)" in said


@pytest.mark.parametrize("slopes", [(-0.1, 1.0), (math.inf,), (math.nan,), ("1",), (), 0.5, "0.5"])
def test_slopes_are_numbers_of_at_least_0_one_for_each_head(slopes):
    with pytest.raises(ValueError, match=r"Laplace: (every slope|slopes) must"):
        Laplace(slopes)


def test_slopes_for_another_number_of_heads_are_refused():
    with pytest.raises(ValueError, match=r"Laplace: 3 slopes .* for 2 heads; give one slope per head"):
        attention(*(tokens(heads=2) for _ in range(3)), Primal(features=Laplace(SLOPES)))
