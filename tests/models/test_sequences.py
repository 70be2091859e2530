"""The classifier of long sequences: its size is the reference's, and padding is nothing but zeros in its mean."""

import pytest
import torch

from primaldual.models import SequenceClassifier, SequenceConfig, SequenceSizes


@pytest.mark.parametrize(
    ("length", "outputs", "pairs", "parameters"),
    [(2048, 10, False, 240_522), (4096, 2, False, 370_562), (4096, 2, True, 395_138), (1024, 10, False, 174_986),
     (1024, 2, False, 173_954)],
    ids=["listops", "text", "retrieval", "image", "pathfinder"],
)  # fmt: skip
def test_there_are_as_many_parameters_as_in_the_reference(length, outputs, pairs, parameters):
    model = SequenceClassifier(SequenceConfig(length=length, outputs=outputs, pairs=pairs))
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize("mechanism", ["softmax", "bn", "sh", "bn+sh", "conv1d"])
def test_what_stands_at_padding_changes_nothing(mechanism):
    model = SequenceClassifier(SequenceConfig(length=32, outputs=3, vocabulary=9, mechanism=mechanism)).double().eval()
    tokens, padding = torch.randint(1, 9, (4, 24)), torch.rand(4, 24) < 0.3
    other = torch.where(padding, torch.randint(1, 9, tokens.shape), tokens)
    torch.testing.assert_close(model(tokens, padding), model(other, padding), rtol=1e-12, atol=1e-12)


def test_the_mean_is_over_the_padded_length():
    config = SequenceConfig(length=64, outputs=3, vocabulary=9, dropout=0.0)
    model = SequenceClassifier(config).double()
    tokens = torch.randint(1, 9, (2, 16))
    x = model.tokens(tokens) + model.positions[:16]
    for layer in model.layers:
        x = layer(x)
    torch.testing.assert_close(model.encode(tokens), model.norm(x).sum(1) / 64)


def test_a_pair_is_scored_by_both_their_product_and_their_difference():
    config = SequenceConfig(length=16, outputs=2, vocabulary=9, pairs=True)
    model = SequenceClassifier(config).double().eval()
    tokens = torch.randint(1, 9, (3, 2, 16))
    a, b = model.encode(tokens[:, 0]), model.encode(tokens[:, 1])
    expected = model.head(model.hidden(torch.cat([a, b, a * b, a - b], -1)).relu())
    torch.testing.assert_close(model(tokens), expected)


@pytest.mark.parametrize(
    ("tokens", "padding", "message"),
    [(torch.ones(2, 17).long(), None, "at most 16"), (torch.ones(2, 2, 8).long(), None, r"\[batch, length\]"),
     (torch.ones(2, 8).long(), torch.zeros(2, 7, dtype=torch.bool), "boolean, of the tokens' shape")],
    ids=["too long", "pairs", "padding"],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(tokens, padding, message):
    model = SequenceClassifier(SequenceConfig(length=16, outputs=2))
    with pytest.raises(ValueError, match=message):
        model(tokens, padding)


def test_sizes_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="multiple of heads"):
        SequenceSizes(d_model=10, heads=3)
    with pytest.raises(ValueError, match="dropout must be"):
        SequenceSizes(dropout=1.0)
