"""What a model asks for and a mechanism cannot do is refused, with the reason."""

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import transformers as hf

from integrations.transformers.tiny import TEXT, inputs, logits, model_of, tokens
from primaldual import Primal, mechanism, mechanisms
from primaldual.integrations.transformers import convert, register
from primaldual.integrations.transformers.call import attend
from primaldual.ops import UnsupportedError


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    register()


class Plain(nn.Module):
    """An attention that says nothing of itself."""


def called(primal: Primal | str = "softmax", keys: int = 5, module: nn.Module | None = None, **given: object) -> Tensor:
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, keys, 8)
    primal = mechanism(primal) if isinstance(primal, str) else primal
    return attend(module or Plain(), q, k, k, None, primal, **({"is_causal": False} | given))[0]


@pytest.mark.parametrize("name", ["softcap", "s_aux", "cache", "cu_seq_lens_q", "head_mask", "layer_head_mask"])
def test_what_is_not_computed_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"hands {name} to its attention, which primaldual does not honour: "):
        called(**{name: torch.ones(2)})
    assert called(**{name: None}).shape == (1, 5, 2, 8)


def test_sinks_of_gpt_oss_are_refused() -> None:
    config = hf.GptOssConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=16, num_local_experts=2, num_experts_per_tok=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = hf.GptOssForCausalLM(config).eval()
    model.set_attn_implementation("primaldual-softmax")
    with pytest.raises(UnsupportedError, match="hands s_aux"):
        model(input_ids=tokens(1, 4))


def test_a_window_that_the_mask_does_not_have_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="sliding_window=4 for 5 keys"):
        called(sliding_window=4)
    assert called(sliding_window=5).isfinite().all()


def test_an_attention_that_does_not_say_whether_it_is_causal_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="Plain does not say whether it is causal"):
        called(is_causal=None)
    with pytest.raises(UnsupportedError, match="5 queries for 3 keys"):
        called(keys=3, is_causal=True)


def test_the_keyword_is_causal_goes_before_the_module() -> None:
    module = Plain()
    module.is_causal = True
    torch.manual_seed(0)
    of_module = called(module=module, is_causal=None)
    torch.manual_seed(0)
    assert torch.equal(called(module=module, is_causal=True), of_module)
    torch.manual_seed(0)
    assert not torch.allclose(called(module=module, is_causal=False), of_module)


@pytest.mark.parametrize("each", ["sh", "bn+sh", "alibi+sh"])
def test_position_bias_is_not_added_to_pooled_keys(each: str) -> None:
    model = model_of("t5")
    model.set_attn_implementation(f"primaldual-{each}")
    with pytest.raises(UnsupportedError, match=r"position_bias to its attention.* scales \(1, 1, 2, 2\)"):
        logits(model, inputs("t5", tokens()))


@pytest.mark.parametrize("each", ["alibi", "sparse"])
def test_places_of_another_sequence_are_refused(each: str) -> None:
    model = model_of("bart")
    model.set_attn_implementation(f"primaldual-{each}")
    with pytest.raises(UnsupportedError, match="cross-attention: queries are of another sequence"):
        logits(model, inputs("bart", tokens(2, 6)))  # as long as the decoder's


@pytest.mark.parametrize("name", ["bart", "bert"])
def test_convolutions_do_not_mix_a_decoders_queries_in_cross_attention(name: str) -> None:
    model, given = model_of("bart"), inputs("bart", tokens(2, 6))
    if name == "bert":
        config = hf.BertConfig(**TEXT, is_decoder=True, add_cross_attention=True)
        model, given = hf.BertLMHeadModel(config), {"input_ids": tokens(2, 6)}
        given["encoder_hidden_states"] = torch.randn(2, 6, 32)
    convert(model, mechanism("conv1d", size=3, causal=True))
    with pytest.raises(UnsupportedError, match="cross-attention: queries are of another sequence"):
        logits(model, given)


@pytest.mark.parametrize("each", [m for m in mechanisms() if mechanism(m).learned(4, 8) or mechanism(m).made(4, 8)])
def test_what_is_learned_is_not_left_at_its_start_in_silence(each: str) -> None:
    model = model_of("vit")
    model.set_attn_implementation(f"primaldual-{each}")
    with pytest.raises(UnsupportedError, match=r"learns .*, and ViTAttention has no such parameters: call .*convert"):
        logits(model, inputs("vit", tokens()))


def test_only_converted_models_have_no_name_of_a_mechanism() -> None:
    model = model_of("bert")
    model.set_attn_implementation("primaldual")
    with pytest.raises(UnsupportedError, match="BertSelfAttention has no mechanism"):
        logits(model, inputs("bert", tokens()))


@pytest.mark.parametrize("name", ["sdpa", "my-flash", "a/b", "paged-bn", "primaldual", "eager", ""])
def test_a_name_that_means_something_else_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="name must be of letters"):
        register(name, "bn")


def test_registering_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match="both a name and a mechanism, or neither"):
        register("mine")
    with pytest.raises(ValueError, match="impl must be one of auto, "):
        register("mine", "bn", impl="fast")
    with pytest.raises(UnsupportedError, match="residual=False"):
        register("mine", Primal(residual=True))
    hf.AttentionInterface.register("theirs", lambda *_, **__: None)
    with pytest.raises(ValueError, match="'theirs' already"):
        register("theirs", "bn")
