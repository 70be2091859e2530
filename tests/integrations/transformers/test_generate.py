"""Decoding with transformers' own caches is the last row of the full forward."""

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache, StaticCache

from integrations.transformers.tiny import CAUSAL, logits, model_of, padded, tokens
from primaldual import mechanism
from primaldual.integrations.transformers import convert, register
from primaldual.ops import CausalFormError, UnsupportedError
from primaldual.primal import DepthwiseConv1d, Fixed, Primal

EACH = ("softmax", "bn", "sh", "bn+sh", "linear", "linear-sh", "sparse-bn+sh", "blocks", "alibi+sh", "gaussian")


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    register()
    register("primaldual-blocks", mechanism("sparse", pattern=Fixed(5, 1)))


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("each", EACH)
def test_every_step_with_a_cache_is_the_full_forward(name: str, each: str) -> None:
    model = model_of(name)
    model.set_attn_implementation(f"primaldual-{each}")
    ids, mask = padded([tokens(1, 11)[0], tokens(1, 7)[0]], "left")
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    full = logits(model, {"input_ids": ids, "attention_mask": mask, "position_ids": places})
    cache, found = DynamicCache(config=model.config), []
    for piece in (slice(0, 4), slice(4, 9), slice(9, 10), slice(10, 11)):
        given = {"input_ids": ids[:, piece], "attention_mask": mask[:, : piece.stop], "position_ids": places[:, piece]}
        found.append(logits(model, given | {"past_key_values": cache}))
    together = torch.cat(found, 1)
    torch.testing.assert_close(together[mask.bool()], full[mask.bool()], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("each", ["softmax", "bn+sh", "blocks"])
@pytest.mark.parametrize("how", ["greedy", "sampling", "beams", "static"])
def test_generate_is_the_same_with_a_cache_and_for_a_prompt_alone(each: str, how: str) -> None:
    options = {
        "greedy": {"do_sample": False},
        "sampling": {"do_sample": True, "top_p": 0.9},
        "beams": {"do_sample": False, "num_beams": 4},
        "static": {"do_sample": False, "cache_implementation": "static"},
    }[how]
    model = model_of("llama")
    model.set_attn_implementation(f"primaldual-{each}")
    rows = [tokens(1, 9)[0], tokens(1, 5)[0]]
    ids, mask = padded(rows, "left")

    def new(ids: torch.Tensor, mask: torch.Tensor, **other: object) -> torch.Tensor:
        torch.manual_seed(3)
        found = model.generate(ids, attention_mask=mask, max_new_tokens=6, **other)
        return found[:, ids.shape[1] :]

    found = new(ids, mask, **options)
    without = {key: x for key, x in options.items() if key != "cache_implementation"}
    assert torch.equal(found, new(ids, mask, **without, use_cache=False))
    if how != "sampling":
        for row, one in zip(rows, found, strict=True):
            assert torch.equal(one, new(row[None], torch.ones_like(row[None]), **options)[0])


def test_a_static_cache_is_read_as_far_as_it_is_filled() -> None:
    model, ids = model_of("gpt2"), tokens(2, 9)
    model.set_attn_implementation("primaldual-bn+sh")
    full = logits(model, {"input_ids": ids})
    cache = StaticCache(config=model.config, max_cache_len=20)
    found = [logits(model, {"input_ids": ids[:, a:b], "past_key_values": cache}) for a, b in ((0, 6), (6, 8), (8, 9))]
    torch.testing.assert_close(torch.cat(found, 1), full, rtol=1e-4, atol=2e-5)


def test_a_cropped_cache_goes_on() -> None:
    model, ids = model_of("llama"), tokens(1, 9)
    model.set_attn_implementation("primaldual-sh")
    cache = DynamicCache(config=model.config)
    logits(model, {"input_ids": torch.cat([ids[:, :6], tokens(1, 3)], 1), "past_key_values": cache})
    cache.crop(-3)
    found = logits(model, {"input_ids": ids[:, 6:], "past_key_values": cache})
    torch.testing.assert_close(found, logits(model, {"input_ids": ids})[:, 6:], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("each", ["linear-bn", "sh of maxima"])
def test_what_has_no_causal_form_is_refused_before_the_first_token(each: str) -> None:
    primal = mechanism("sh", how="max") if "maxima" in each else mechanism(each)
    register("no-causal-form", primal)
    model = model_of("llama")
    model.set_attn_implementation("no-causal-form")
    with pytest.raises(CausalFormError, match="causal"):
        model.generate(tokens(1, 1), max_new_tokens=1)
    with pytest.raises(CausalFormError, match=r"model\.layers\.0\.self_attn of LlamaForCausalLM is causal"):
        convert(model, primal)


@pytest.mark.parametrize("primal", [mechanism("forget"), Primal(inputs=(DepthwiseConv1d(3, causal=True),))], ids=repr)
def test_what_needs_the_input_of_all_tokens_is_decoded_without_a_cache(primal: Primal) -> None:
    model, ids = model_of("llama"), tokens(1, 5)
    convert(model, primal)
    with pytest.raises(UnsupportedError, match="use_cache=False"):
        model.generate(ids, max_new_tokens=1)
    found = model.generate(ids, max_new_tokens=3, do_sample=False, use_cache=False)
    assert torch.equal(found[:, 5:], logits(model, {"input_ids": found})[:, 4:-1].argmax(-1))


@pytest.mark.parametrize(("name", "each"), [("bart", "bn+sh"), ("t5", "bn"), ("t5", "softmax")])
def test_encoder_and_decoder_generate_alike_with_a_cache_and_without(name: str, each: str) -> None:
    model = model_of(name)
    model.set_attn_implementation(f"primaldual-{each}")
    ids, mask = padded([tokens(1, 9)[0], tokens(1, 5)[0]], "right")
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, **options, use_cache=False))
