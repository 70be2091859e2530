"""Continuations of prompts: greedy, drawn, or the best of some beams."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..models import LanguageModel
from ..ops.decoding import Cache
from .beams import beam_search
from .choice import Choice
from .stream import stream


class Generated(NamedTuple):
    """What was generated, [batch, tokens], without the prompts; and the cache, which has all but the last token."""

    tokens: Tensor
    cache: Cache


def generate(
    model: LanguageModel, tokens: Tensor, *, max_tokens: int, temperature: float = 0.0, top_p: float = 1.0,
    seed: int | None = None, num_beams: int = 1, eos: int | None = None, padding: Tensor | None = None,
    cache: Cache | None = None, piece: int | None = None,
) -> Generated:  # fmt: skip
    """Continue every row of `tokens` [batch, length].

    Args:
        model: a language model.
        tokens: prompts; `left_padded` makes a batch of several lengths, and its padding.
        max_tokens: of a continuation.
        temperature: 0 takes the token of the largest score; else tokens are drawn, by the softmax of scores over it.
        top_p: drawn is among the most probable tokens that have this probability together.
        seed: of what is drawn.
        num_beams: beams of a search for the most probable continuation, which draws nothing.
        eos: the token after which a row ends; shorter rows are filled up with it.
        padding: [batch, length], True at tokens that are none.
        cache: the model's, with what stands before the prompts; a new one unless given.
        piece: prompts are read in pieces of so many tokens.

    >>> from primaldual.models import LanguageConfig, LanguageModel
    >>> model = LanguageModel(LanguageConfig(d_model=32, heads=2, layers=2, feedforward=64, vocabulary=256))
    >>> generate(model, torch.tensor([[1, 2, 3]]), max_tokens=5).tokens.shape
    torch.Size([1, 5])
    """
    choice = Choice(temperature, top_p)
    cache = model.cache(len(tokens)) if cache is None and isinstance(tokens, Tensor) and tokens.dim() else cache
    if num_beams != 1:
        if temperature:
            raise ValueError(f"num_beams={num_beams} searches and draws nothing; give temperature=0 or num_beams=1")
        found, _ = beam_search(
            model, tokens, max_tokens=max_tokens, num_beams=num_beams, eos=eos, padding=padding, cache=cache,
            piece=piece,
        )  # fmt: skip
    else:
        parts = list(
            stream(model, tokens, max_tokens=max_tokens, choice=choice, seed=seed, eos=eos, padding=padding,
                   cache=cache, piece=piece)
        )  # fmt: skip
        found = torch.stack(parts, 1) if parts else tokens[:, :0]
    assert cache is not None
    return Generated(found, cache)
