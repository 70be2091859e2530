"""Masks by query, of windows and of packed sequences: honoured where a mechanism has such a form, and else refused."""

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache, StaticCache

from integrations.transformers.tiny import inputs, logits, model_of, padded, tokens
from primaldual.integrations.transformers import convert, register
from primaldual.integrations.transformers.masks import mask_of
from primaldual.ops import UnsupportedError


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    register()
    register("reference-bn", "bn", impl="reference")


def test_a_mask_says_what_is_padding_and_leaves_causality_to_the_attention() -> None:
    keep = torch.tensor([[False, True, True, True], [True, True, True, True]])
    assert mask_of(2, 4, 4, attention_mask=None) is None
    assert mask_of(2, 4, 4, attention_mask=torch.ones_like(keep)) is None
    assert torch.equal(mask_of(2, 4, 4, attention_mask=keep), keep)
    assert torch.equal(mask_of(2, 1, 4, q_offset=3, attention_mask=keep), keep)


def test_a_mask_ends_where_a_static_cache_is_filled() -> None:
    keep = torch.ones(2, 9, dtype=torch.bool)
    assert mask_of(2, 2, 9, q_offset=torch.tensor(3), attention_mask=None).shape == (2, 5)
    assert mask_of(2, 2, 9, q_offset=3, attention_mask=keep).shape == (2, 5)
    assert mask_of(2, 9, 9, attention_mask=keep) is None


@pytest.mark.parametrize("name", ["modernbert", "qwen3"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_sliding_window_hides_what_transformers_hides(name: str, side: str) -> None:
    model = model_of(name, window=4)
    ids, mask = padded([tokens(1, 13)[0], tokens(1, 8)[0]], side)
    given = inputs(name, ids, mask)
    found = {}
    for each in ("eager", "primaldual-softmax", "primaldual-bn", "reference-bn"):
        model.set_attn_implementation(each)
        found[each] = logits(model, given)[mask.bool()]
    torch.testing.assert_close(found["primaldual-softmax"], found["eager"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["primaldual-bn"], found["reference-bn"], rtol=1e-4, atol=1e-5)
    wide = model_of(name, window=64)
    wide.set_attn_implementation("eager")
    assert not torch.allclose(logits(wide, given)[mask.bool()], found["eager"], atol=1e-4)


@pytest.mark.parametrize("name", ["modernbert", "qwen3"])
@pytest.mark.parametrize("each", ["sh", "alibi", "sparse"])
def test_what_has_no_form_with_a_window_is_refused_where_the_window_hides(name: str, each: str) -> None:
    model = model_of(name, window=6)
    model.set_attn_implementation(f"primaldual-{each}")
    assert logits(model, inputs(name, tokens(1, 6))).isfinite().all()
    why = "fitted to pooled keys" if each == "sh" else "depends on the places"
    with pytest.raises(UnsupportedError, match=f"sliding window shorter than the sequence.*{why}"):
        logits(model, inputs(name, tokens(1, 9)))


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@pytest.mark.parametrize("each", ["softmax", "bn"])
def test_decoding_with_a_window_is_the_full_forward(kind: type, each: str) -> None:
    model, ids = model_of("qwen3", window=4), tokens(1, 11)
    model.set_attn_implementation(f"primaldual-{each}")
    cache = kind(config=model.config) if kind is DynamicCache else kind(config=model.config, max_cache_len=16)
    pieces = ((0, 3), (3, 8), (8, 9), (9, 10), (10, 11))
    found = [logits(model, {"input_ids": ids[:, a:b], "past_key_values": cache}) for a, b in pieces]
    torch.testing.assert_close(torch.cat(found, 1), logits(model, {"input_ids": ids}), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("each", ["softmax", "bn", "linear"])
def test_packed_sequences_are_the_same_as_apart(each: str) -> None:
    model, parts = model_of("llama"), [tokens(1, 7), tokens(1, 5)]
    model.set_attn_implementation(f"primaldual-{each}")
    places = torch.cat([torch.arange(7), torch.arange(5)])[None]
    found = logits(model, {"input_ids": torch.cat(parts, 1), "position_ids": places, "use_cache": False})
    apart = torch.cat([logits(model, {"input_ids": part}) for part in parts], 1)
    torch.testing.assert_close(found, apart, rtol=1e-4, atol=2e-5)


def test_packed_sequences_are_not_pooled_across() -> None:
    model = model_of("llama")
    model.set_attn_implementation("primaldual-sh")
    places = torch.cat([torch.arange(7), torch.arange(5)])[None]
    with pytest.raises(UnsupportedError, match="packed sequences"):
        logits(model, {"input_ids": tokens(1, 12), "position_ids": places, "use_cache": False})


@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_a_mask_of_ones_own_is_honoured(kind: str) -> None:
    model, ids = model_of("bert"), tokens(2, 9)
    own = torch.rand(2, 1, 9, 9) < 0.7
    own |= torch.eye(9, dtype=torch.bool)
    mask = own if kind == "boolean" else torch.zeros(own.shape).masked_fill(~own, torch.finfo(torch.float32).min)
    found = {}
    for each in ("sdpa", "primaldual-softmax", "primaldual-bn", "reference-bn"):
        model.set_attn_implementation(each)
        found[each] = logits(model, {"input_ids": ids, "attention_mask": mask})
    torch.testing.assert_close(found["primaldual-softmax"], found["sdpa"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["primaldual-bn"], found["reference-bn"], rtol=1e-4, atol=1e-5)


def test_a_mask_of_one_row_for_all_queries_is_padding() -> None:
    model, (ids, keep) = model_of("bert"), padded([tokens(1, 9)[0], tokens(1, 6)[0]], "right")
    model.set_attn_implementation("primaldual-bn+sh")
    expected = logits(model, {"input_ids": ids, "attention_mask": keep})
    assert not torch.allclose(expected, logits(model, {"input_ids": ids}), atol=1e-4)
    added = torch.zeros(2, 1, 1, 9).masked_fill(~keep.bool()[:, None, None], torch.finfo(torch.float32).min)
    assert torch.equal(logits(model, {"input_ids": ids, "attention_mask": added}), expected)


def test_a_decoder_used_as_an_encoder_sees_both_sides() -> None:
    model, ids = model_of("llama"), tokens(2, 9)
    model.config.is_causal = False
    model.set_attn_implementation("primaldual-linear-bn")  # which has no causal form
    whole = logits(model, {"input_ids": ids})
    other = ids.clone()
    other[:, -1] = (ids[:, -1] + 1) % 60
    assert not torch.allclose(logits(model, {"input_ids": other})[:, 0], whole[:, 0], atol=1e-5)
    convert(model, "linear-bn")
    assert torch.equal(logits(model, {"input_ids": ids}), whole)
