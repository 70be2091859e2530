"""One sequence of a call as one regression; for heads with one per query, that of the last valid query."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..dual.form import pooling_of
from ..primal import Gated
from ..svr.design import hides_points
from .calls import AttentionCall


class OneSequence(NamedTuple):
    """One sequence of a call as `recover` and `fit` take it."""

    keys: Tensor  # [1, H, S, D]
    values: Tensor
    hidden: Tensor  # bool [1, S]
    query: int | None
    parameters: dict[str, Tensor]  # what is learned, and what there is for each of the keys


class RefusalError(Exception):
    """Why a call has no regression that could be diagnosed."""


class Notes:
    """Remarks on each head, in order and each once."""

    def __init__(self, heads: int) -> None:
        self.heads: list[dict[str, None]] = [{} for _ in range(heads)]

    def add(self, text: str, where: Tensor | None = None) -> None:
        """To all heads, or to those where a boolean [H] is True."""
        for head, notes in enumerate(self.heads):
            if where is None or bool(where[head]):
                notes[text] = None

    def of(self, head: int) -> str:
        return "; ".join(self.heads[head])


def sequence_of(call: AttentionCall, element: int, notes: Notes) -> OneSequence:
    """Keys, values and what is hidden of them; remarks go to the notes, and what is no regression is refused."""
    S, queries = call.keys.shape[2], call.queries.shape[2]
    if isinstance(call.primal.normalizer, Gated):
        if call.primal.normalizer.per == "channel":
            raise RefusalError("a gate for each channel: each output is a regression of its own, with its own kernel")
        if call.gate is None:
            raise RefusalError("a gate is a function of the queries' input, and the keys come of another")
    hidden = torch.zeros(S, dtype=torch.bool, device=call.keys.device)
    if call.padding is not None:
        hidden = _hides(call.padding[element], "key_padding_mask")
    kinds = {
        "causal": call.is_causal,
        "sparse": hides_points(call.primal.training_set, call.keys.shape[1], S),
        "masked": call.mask is not None and bool(_hides(call.mask, "attn_mask").any()),
    }
    kind = [name for name, holds in kinds.items() if holds]
    query = None
    if kind:
        valid = (~hidden[: min(call.tokens, queries)]).nonzero()
        query = int(valid[-1]) if len(valid) else 0
        notes.add(f"{' and '.join(kind)}: one regression per query, here that of the last valid query")
    if kinds["masked"]:
        assert query is not None and call.mask is not None
        hidden = hidden | _mask_row(call, element, query)
    keys, values = (x[element : element + 1].double() for x in (call.keys, call.values))
    keys, values = (x.masked_fill(hidden[:, None], 0.0) for x in (keys, values))
    if not bool(keys.isfinite().all() and values.isfinite().all()):
        raise RefusalError("keys or values are not finite")
    if (pooled := pooling_of(call.primal.training_set)) is not None and pooled.how == "conv":
        raise RefusalError("conv pooling mixes targets with learned weights, so targets per token do not follow from α")
    given = call.parameters_of(slice(element, element + 1))
    if call.gate is not None:
        given["gate"] = call.gate[element : element + 1]
    return OneSequence(keys, values, hidden[None], query if kinds["causal"] or kinds["sparse"] else None, given)


def _hides(mask: Tensor, name: str) -> Tensor:
    if mask.dtype == torch.bool:
        return mask
    hidden = mask == -torch.inf
    if bool((mask.masked_fill(hidden, 0.0) != 0).any()):
        raise RefusalError(f"{name} adds finite numbers to the scores: a weight on keys, which the regression has not")
    return hidden


def _mask_row(call: AttentionCall, element: int, query: int) -> Tensor:
    """The keys [S] that an attention mask hides from one query."""
    assert call.mask is not None
    mask = call.mask if call.mask.dim() == 4 else call.mask[None, None]
    rows = _hides(mask[min(element, mask.shape[0] - 1), :, query], "attn_mask")
    if bool((rows != rows[:1]).any()):
        raise RefusalError("attn_mask hides different keys from different heads; give one mask for all heads")
    return rows[0]
