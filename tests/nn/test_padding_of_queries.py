"""Whose padding a mask is follows from arguments and shapes, never from which tensor object was given."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nn.layers import GRIDDED, E, L, N, each, make
from primaldual.nn import ConvProjection, MultiheadAttention
from support.battery import relative_error

PADDING = torch.arange(L) >= torch.tensor([[L], [5]])
NOBODY = torch.zeros(N, L, dtype=torch.bool)
CONVOLVED = {
    "token map": lambda: make("conv1d"),
    "projection": lambda: make("softmax", projection=ConvProjection(3, dims=1)),
}
convolutions = pytest.mark.parametrize("make_layer", CONVOLVED.values(), ids=CONVOLVED)


def outputs_and_gradients(layer: MultiheadAttention, x: Tensor, *given: Tensor, **masks: Tensor) -> list[Tensor]:
    out, _ = layer(*given, need_weights=False, **masks)
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=out.dtype)
    return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], up)]


@each(without=GRIDDED)
def test_copies_and_views_of_the_queries_are_self_attention(primal):
    layer, x = make(primal), torch.randn(N, L, E, dtype=torch.float64, requires_grad=True)
    expected = outputs_and_gradients(layer, x, x, x, x, key_padding_mask=PADDING)
    for given in ((x, x.clone(), x.clone()), (x[:], x, x[:])):
        found = outputs_and_gradients(layer, x, *given, key_padding_mask=PADDING)
        for mine, other in zip(found, expected, strict=True):
            assert relative_error(mine, other) < 1e-10


@convolutions
def test_a_reentrant_checkpoint_changes_no_gradient(make_layer):
    layer, x = make_layer(), torch.randn(N, L, E, dtype=torch.float64, requires_grad=True)

    def attend(x: Tensor) -> Tensor:
        return layer(x, x, x, key_padding_mask=PADDING, need_weights=False)[0]

    def attend_to_three(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return layer(q, k, v, key_padding_mask=PADDING, need_weights=False)[0]

    leaves = [x, *layer.parameters()]
    attend(x).square().sum().backward()
    expected = [leaf.grad for leaf in leaves]
    for out in (lambda: checkpoint(attend, x, use_reentrant=True),
                lambda: checkpoint(attend_to_three, x, x, x, use_reentrant=True)):  # fmt: skip
        for leaf in leaves:
            leaf.grad = None
        out().square().sum().backward()
        torch.testing.assert_close([leaf.grad for leaf in leaves], expected)


@convolutions
def test_what_stands_at_padded_queries_moves_no_other(make_layer):
    layer, x = make_layer(), torch.randn(N, L, E, dtype=torch.float64)
    other = x.masked_fill(PADDING.unsqueeze(-1), 7.0)
    found, expected = (layer(t, x[:, :8], x[:, :8], query_padding_mask=PADDING)[0] for t in (other, x))
    torch.testing.assert_close(found[~PADDING], expected[~PADDING])


@convolutions
def test_a_key_mask_says_nothing_of_other_queries(make_layer):
    """An all-False mask for the queries says that none is padding; one of another length needs no such word."""
    layer, x = make_layer(), torch.randn(N, L, E, dtype=torch.float64)
    keys, of_keys = x.detach().clone(), PADDING
    said = layer(x, keys, keys, key_padding_mask=of_keys, query_padding_mask=NOBODY)[0]
    longer = torch.cat([keys, torch.zeros(N, 1, E, dtype=torch.float64)], 1)
    more = torch.cat([of_keys, torch.ones(N, 1, dtype=torch.bool)], 1)
    torch.testing.assert_close(layer(x, longer, longer, key_padding_mask=more)[0], said)
    assert not torch.allclose(layer(x, keys, keys, key_padding_mask=of_keys)[0], said)


def test_a_mask_of_the_wrong_shape_is_named():
    layer, x = make("conv1d"), torch.randn(N, L, E, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"query_padding_mask must be \[batch, length\] = \[2, 9\], got \[2, 8\]"):
        layer(x, x, x, query_padding_mask=PADDING[:, :8])


def test_convolutional_projections_let_nothing_hidden_through():
    layer, x = make("softmax", projection=ConvProjection(3, dims=1)), torch.randn(N, L, E, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"attn_mask hides tokens that ConvProjection.* mixes into others"):
        layer(x, x, x, attn_mask=torch.ones(L, L, dtype=torch.bool).triu(1))
    layer(x, x, x, attn_mask=torch.zeros(L, L, dtype=torch.bool))
