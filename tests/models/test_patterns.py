"""The transformer on convolutions: every part is used, and padding is not seen."""

import pytest
import torch

from primaldual.models import PatternConfig, PatternSizes, PatternTransformer

SMALL = {
    "channels": 3, "length": 24, "outputs": 4, "d_model": 12, "heads": 2, "feedforward": 16, "tokens": 12,
    "widths": (3, 5), "pooling": ("mean", "max", "attention"),
}  # fmt: skip
PADDING = torch.arange(24) >= torch.tensor([24, 10, 17, 3, 24])[:, None]


def model(**settings) -> PatternTransformer:
    torch.manual_seed(0)
    return PatternTransformer(PatternConfig(**SMALL | settings)).eval()


@pytest.mark.parametrize("name", ["softmax", "bn+sh", "linear"])
@pytest.mark.parametrize("padding", [None, PADDING], ids=["whole", "padded"])
def test_every_parameter_gets_a_gradient(name, padding):
    one = model(mechanism=name).train()
    one(torch.randn(5, 24, 3), padding).square().sum().backward()
    # a constant on all keys cancels in softmax: in_proj_bias has those of the queries and values besides
    assert not {n for n, p in one.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0}


@pytest.mark.parametrize("settings", [{}, {"instance": True}, {"blocks": 0}, {"tokens": 24}, {"tokens": 5}], ids=str)
def test_what_stands_at_padded_steps_does_not_matter(settings):
    one, x = model(**settings), torch.randn(5, 24, 3)
    other = torch.where(PADDING.unsqueeze(-1), 1e3 * torch.randn_like(x), x)
    torch.testing.assert_close(one(x, PADDING), one(other, PADDING))


def test_places_after_the_end_of_a_series_are_not_attended_to():
    one, x = model(tokens=24), torch.randn(5, 24, 3)
    before = one(x, PADDING)
    with torch.no_grad():
        one.positions[17:] += torch.randn(7, 12)
    after = one(x, PADDING)
    ends = (~PADDING).sum(1)
    torch.testing.assert_close(after[ends <= 17], before[ends <= 17])
    assert (after - before)[ends > 17].abs().amax(1).min() > 1e-2


def test_scale_and_level_of_a_series_do_not_matter_where_it_is_standardised_by_itself():
    one, x = model(instance=True).double(), torch.randn(5, 24, 3, dtype=torch.float64)
    torch.testing.assert_close(one(100 * x), one(100 * (3 * x - 7)), rtol=1e-2, atol=1e-3)
    assert (model().double()(x) - model().double()(3 * x - 7)).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"widths": (4,)}, "odd"), ({"pooling": ()}, "pooling"), ({"pooling": ("median",)}, "median"),
     ({"widths": (3,) * 70}, "share")], ids=str,
)  # fmt: skip
def test_sizes_that_cannot_be_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        PatternSizes(**settings)


def test_a_series_of_another_length_is_refused():
    with pytest.raises(ValueError, match=r"24, 3\].*pad or cut"):
        model()(torch.randn(2, 20, 3))
