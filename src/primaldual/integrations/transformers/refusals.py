"""What models of transformers may ask of an attention, and ours does not compute: refused, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...dual.form import form_of, knows_positions, places_of
from ...ops import UnsupportedError
from ...primal import Primal

_REASONS = {
    "softcap": "it bounds the scores, another kernel than the mechanism's; set the model's softcapping to None",
    "s_aux": "it is a sink of the model's own; mechanisms bring theirs, as 'sink' does, for models that have none",
    "cache": "a paged cache hands over keys of several sequences in one row; use generate without continuous batching",
    "cu_seq_lens_q": "sequences packed by their lengths are not told apart; pad them, with an attention_mask",
    "head_mask": "the weights of single heads are not masked; give None",
    "layer_head_mask": "the weights of single heads are not masked; give None",
}


def refuse_arguments(given: Mapping[str, Any]) -> None:
    """Raise where an argument says what is not computed."""
    for name, reason in _REASONS.items():
        if given.get(name) is not None:
            raise UnsupportedError(
                f"the model hands {name} to its attention, which primaldual does not honour: {reason}"
            )


def refuse_window(window: int | None, mask: Tensor | None, keys: int) -> None:
    """Raise where a sliding window hides keys and the mask does not say so."""
    if window is not None and keys > window and (mask is None or mask.dim() != 4):
        raise UnsupportedError(
            f"the model hands sliding_window={window} for {keys} keys to its attention, and a mask that does not hide "
            f"what is outside; it must make its masks with transformers.masking_utils"
        )


def refuse_by_query(primal: Primal, heads: int) -> None:
    """Raise where keys hidden from some queries would change what is counted, pooled or mixed."""
    scales = primal.training_set.head_scales(heads)
    form = form_of(primal)
    if max(scales) > 1:
        why = f"heads of scales {scales} are fitted to pooled keys, of which single ones cannot be hidden"
    elif primal.token_maps:
        why = f"{primal.token_maps[0]!r} depends on the places of tokens, which such a mask does not give"
    elif places_of(primal, scales, True) != "none" or form.subset != "all" or knows_positions(primal.features):
        why = "it depends on the places of tokens, which such a mask does not give"
    else:
        return
    raise UnsupportedError(
        f"the model hides keys from single queries (a sliding window shorter than the sequence, packed sequences, or a "
        f"mask of its own), which {primal!r} has no form for: {why}. Take a mechanism over all keys, such as 'bn', or "
        f"a window as long as the sequence"
    )


def refuse_bias(primal: Primal, heads: int) -> None:
    """Raise where a bias on the scores of single keys meets pooled ones."""
    scales = primal.training_set.head_scales(heads)
    if max(scales) > 1:
        raise UnsupportedError(
            f"the model hands position_bias to its attention, which adds to the scores of single keys, and heads of "
            f"scales {scales} are fitted to pooled ones; take a mechanism over all keys, such as 'bn'"
        )


def refuse_across(primal: Primal) -> None:
    """Raise where queries are of another sequence than keys, and the mechanism puts them beside one another."""
    maps, form = primal.token_maps, form_of(primal)
    if maps or form.subset != "all" or knows_positions(primal.features):
        what = repr(maps[0]) if maps else repr(primal.features if form.subset == "all" else primal.training_set)
        raise UnsupportedError(
            f"cross-attention: queries are of another sequence than keys, and {what} puts them at places of one; take "
            f"a mechanism without places, such as 'bn' or 'sh'"
        )
