"""Tokens as they come."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..models import LanguageModel
from ..ops.decoding import Cache
from .choice import Choice
from .prompts import checked


def stream(
    model: LanguageModel, tokens: Tensor, *, max_tokens: int, choice: Choice | None = None, seed: int | None = None,
    eos: int | None = None, padding: Tensor | None = None, cache: Cache | None = None, piece: int | None = None,
) -> Iterator[Tensor]:  # fmt: skip
    """The next token of every row, [batch], one after the other: y_t is chosen by the scores after tokens and y_{<t}.

    Args:
        model: in `eval` or not, it is not changed.
        tokens: prompts, [batch, length].
        max_tokens: so many are yielded at most.
        choice: the largest score unless given.
        seed: of what is drawn; torch's own generator unless given.
        eos: a row that has given this token gives it again, and the stream ends when all have.
        padding: [batch, length], True at tokens that are none, at the left or the right of a row.
        cache: an empty one of the model, or one with what stands before `tokens`; a new one unless given.
        piece: prompts are read in pieces of so many tokens, at once unless given.
    """
    tokens, padding = checked(tokens, padding, model.config.vocabulary)
    counts(max_tokens=max_tokens, piece=piece)
    choice = choice or Choice()
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    cache = model.cache(len(tokens)) if cache is None else cache
    return _stream(model, tokens, max_tokens, choice, generator, eos, padding, cache, piece)


def _stream(
    model: LanguageModel, tokens: Tensor, max_tokens: int, choice: Choice, generator: torch.Generator | None,
    eos: int | None, padding: Tensor | None, cache: Cache, piece: int | None,
) -> Iterator[Tensor]:  # fmt: skip
    if not max_tokens:
        return
    scores = read(model, tokens, padding, cache, piece)
    ended = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    for left in reversed(range(max_tokens)):
        found = choice(scores, generator)
        if eos is not None:
            found = found.masked_fill(ended, eos)
            ended |= found == eos
        yield found
        if not left or (eos is not None and bool(ended.all())):
            return
        scores = model.decode(found[:, None], cache, last=True)


def read(model: LanguageModel, tokens: Tensor, padding: Tensor | None, cache: Cache, piece: int | None) -> Tensor:
    """Scores [batch, vocabulary] after prompts, which the cache has then; a row may end before the last piece."""
    size = tokens.shape[1] if piece is None else piece
    scores: Tensor | None = None
    for first in range(0, tokens.shape[1], size):
        hidden = None if padding is None else padding[:, first : first + size]
        new = model.decode(tokens[:, first : first + size], cache, padding=hidden, last=True)
        scores = new if scores is None or hidden is None else new.where(~hidden.all(1, keepdim=True), scores)
    assert scores is not None
    return scores


def counts(**given: int | None) -> None:
    """Raise unless these are integers, of at least 0 or 1."""
    for name, value in given.items():
        least = 0 if name == "max_tokens" else 1
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
