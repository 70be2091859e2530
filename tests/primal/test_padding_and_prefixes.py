"""What a sequence's output does not depend on: how far its batch is padded, and, under causality, what comes later."""

import pytest
import torch
from torch import Tensor

from primaldual import Primal, attention, mechanism, mechanisms
from support.battery import HEADS, VARIANTS, Case, parameters, shortened

PRIMALS: dict[str, Primal] = {name: mechanism(name) for name in mechanisms()} | VARIANTS
OF_THE_LENGTH = {
    "conv2d": "its tokens fill a grid, which other lengths do not",
    "sparse-by-length": "its stride is asked for as round(√N) of the padded length",
}
CAUSAL = [name for name, primal in PRIMALS.items() if primal.causal_refusal(HEADS) is None]
CLOSE = {"rtol": 0, "atol": 1e-10}


def tensors(batch: int, length: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(length)
    return tuple(torch.randn(batch, HEADS, length, d, generator=generator, dtype=torch.float64) for d in (4, 4, 5))


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("name", [name for name in PRIMALS if name not in OF_THE_LENGTH])
def test_padding_moves_no_output_of_a_valid_token(name: str, impl: str) -> None:
    primal = PRIMALS[name]
    for length, padded in ((16, 36), (37, 80)):
        learned = parameters(primal, Case(padded, padded))
        q, k, v = tensors(2, padded)
        hidden = torch.arange(padded).expand(2, -1) >= length
        masks = {"key_padding_mask": hidden, "query_padding_mask": hidden}
        longer = attention(q, k, v, primal, impl=impl, parameters=learned, **masks)[:, :, :length]
        cut, short = (x[:, :, :length] for x in (q, k, v)), shortened(primal, learned, length)
        torch.testing.assert_close(longer, attention(*cut, primal, impl=impl, parameters=short), **CLOSE)


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("name", CAUSAL)
def test_no_later_token_moves_a_causal_output(name: str, impl: str) -> None:
    primal = PRIMALS[name]
    learned = parameters(primal, Case(37, 37), batch=1)
    q, k, v = tensors(1, 37)
    whole = attention(q, k, v, primal, impl=impl, parameters=learned, is_causal=True)
    for length in (1, 9, 16, 25, 36):
        cut = (x[:, :, :length] for x in (q, k, v))
        short = shortened(primal, learned, length)
        alone = attention(*cut, primal, impl=impl, parameters=short, is_causal=True)
        torch.testing.assert_close(whole[:, :, :length], alone, **CLOSE)


def test_what_has_no_causal_form_says_why() -> None:
    reasons = {name: primal.causal_refusal(HEADS) for name, primal in PRIMALS.items() if name not in CAUSAL}
    words = {
        "conv1d": "looks ahead", "conv1d-each": "looks ahead", "conv2d": "depend on later ones",
        "sh-max": "max pooling", "sh-conv": "conv pooling", "sh-kmeans": "kmeans pooling",
        "forget-kmeans": "kmeans pooling", "sparse-by-length": "round(√N) of the whole length",
    }  # fmt: skip
    words |= dict.fromkeys(("linear-bn", "linear-bn+sh", "linear-random", "linear-full+sh"), "nothing cancels")
    assert reasons.keys() == words.keys()
    assert all(words[name] in reason for name, reason in reasons.items()), reasons
