"""Beam search: the continuations of the largest probability that are found by keeping a few at every step."""

from __future__ import annotations

import torch
from torch import Tensor

from ..models import LanguageModel
from ..ops.decoding import Cache
from .prompts import checked
from .stream import counts, read


@torch.no_grad()
def beam_search(
    model: LanguageModel, tokens: Tensor, *, max_tokens: int, num_beams: int, eos: int | None = None,
    padding: Tensor | None = None, cache: Cache | None = None, piece: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The best continuation [batch, at most max_tokens], and its log-probability [batch].

    At every step each of `num_beams` beams is continued by every token, and the best of all go on. A beam that has
    given `eos` is done: its log-probability stays, and it stands beside the others. Rows end with `eos` where they are
    shorter.
    """
    tokens, padding = checked(tokens, padding, model.config.vocabulary)
    counts(max_tokens=max_tokens, num_beams=num_beams, piece=piece)
    batch, vocabulary, device = len(tokens), model.config.vocabulary, tokens.device
    cache = model.cache(batch) if cache is None else cache
    found = tokens.new_empty(batch, num_beams, 0)
    total = torch.full((batch, num_beams), -torch.inf, dtype=torch.float64, device=device)
    total[:, 0] = 0.0  # all beams begin alike: one stands for them
    if not max_tokens:
        return found[:, 0], total[:, 0]
    scores = read(model, tokens, padding, cache, piece).repeat_interleave(num_beams, 0)
    cache.expand(num_beams)
    ended = torch.zeros(batch, num_beams, dtype=torch.bool, device=device)
    first = torch.arange(batch, device=device)[:, None] * num_beams
    for step in range(max_tokens):
        each = scores.double().log_softmax(-1).view(batch, num_beams, vocabulary)
        if eos is not None:
            each = each.masked_fill(ended[..., None], -torch.inf)
            each[..., eos] = each[..., eos].masked_fill(ended, 0.0)
        total, best = (total[..., None] + each).flatten(1).topk(num_beams, dim=-1)
        beam, token = best // vocabulary, best % vocabulary
        found = torch.cat([found.gather(1, beam[..., None].expand_as(found)), token[..., None]], -1)
        if eos is not None:
            ended = ended.gather(1, beam) | (token == eos)
        if step + 1 == max_tokens or bool(ended.all()):
            break
        cache.reorder((first + beam).flatten())
        scores = model.decode(token.flatten()[:, None], cache, last=True)
    return found[:, 0], total[:, 0]
