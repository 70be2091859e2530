"""`convert` puts what a mechanism learns on the model, which is trained, saved and loaded with it."""

import copy
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import transformers as hf

from integrations.transformers.tiny import inputs, logits, model_of, padded, tokens
from primaldual import Primal, mechanism
from primaldual.integrations.transformers import convert, load, revert
from primaldual.ops import UnsupportedError
from primaldual.primal import DepthwiseConv1d, Gated, Recenter

LEARNED = {
    "beta": (mechanism("bn+sh", learnable=True), ("bert", "vit", "gpt2", "llama", "bart")),
    "sink": (mechanism("sink"), ("bert", "vit", "gpt2", "llama", "qwen3", "bart", "t5")),
    "gate": (mechanism("gate+sh"), ("bert", "vit", "gpt2", "llama", "qwen3", "bart", "modernbert")),
    "gate of heads": (Primal(normalizer=Gated(per="head"), bias=True), ("roberta", "gpt2", "llama", "bart")),
    "qk-norm": (mechanism("qk-norm", temperature=True), ("bert", "llama", "bart")),
    "forget": (mechanism("forget+sh"), ("bert", "llama")),
    "conv pooling": (mechanism("sh", how="conv"), ("bert", "vit", "roberta")),
    "conv1d": (mechanism("conv1d", size=3), ("bert", "roberta", "modernbert")),
    "causal conv1d": (Primal(inputs=(DepthwiseConv1d(3, causal=True),)), ("gpt2", "llama", "qwen3")),
    "conv2d": (mechanism("conv2d", prefix=1), ("vit",)),
}
PAIRS = [(name, each) for each, (_, names) in LEARNED.items() for name in names]


def converted(name: str, primal: Primal, impl: str = "auto") -> hf.PreTrainedModel:
    """With what is learned away from its start."""
    model = model_of(name)
    convert(model, primal, impl=impl)
    torch.manual_seed(5)
    with torch.no_grad():
        for each, weight in model.named_parameters():
            if ".primaldual." in each:
                weight.add_(0.3 * torch.randn_like(weight))
    return model


@pytest.mark.parametrize(("name", "each"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_what_is_learned_is_on_the_model_and_acts_as_in_the_reference(name: str, each: str) -> None:
    primal = LEARNED[each][0]
    given = inputs(name, tokens())
    model, reference = converted(name, primal), converted(name, primal, "reference")
    found = logits(model, given)
    torch.testing.assert_close(found, logits(reference, given), rtol=1e-5, atol=2e-5)
    started = model_of(name)
    convert(started, primal)
    assert not torch.allclose(found, logits(started, given), atol=1e-4)
    model(**given).logits.square().sum().backward()
    learned = {n: p for n, p in model.named_parameters() if ".primaldual." in n}
    assert learned and all(p.grad is not None and p.grad.abs().max() > 0 for p in learned.values())


@pytest.mark.parametrize(
    ("name", "each"),
    [("bert", each) for each in ("gate", "forget", "conv1d", "conv pooling", "qk-norm")]
    + [("llama", each) for each in ("beta", "gate", "forget", "causal conv1d")],
)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_is_a_sequence_alone(name: str, each: str, side: str) -> None:
    model = converted(name, LEARNED[each][0]).double()
    rows = [tokens(1, length)[0] for length in (13, 6)]
    together = logits(model, inputs(name, *padded(rows, side)))
    for row, found in zip(rows, together, strict=True):
        found = found[-len(row) :] if side == "left" else found[: len(row)]
        torch.testing.assert_close(found, logits(model, inputs(name, row[None]))[0], rtol=1e-8, atol=1e-8)


def test_gates_are_of_the_queries_at_hand_when_decoding() -> None:
    model, ids = converted("llama", LEARNED["gate"][0]), tokens(1, 7)
    cache = hf.DynamicCache(config=model.config)
    found = [logits(model, {"input_ids": ids[:, a:b], "past_key_values": cache}) for a, b in ((0, 5), (5, 6), (6, 7))]
    torch.testing.assert_close(torch.cat(found, 1), logits(model, {"input_ids": ids}), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("name", "each"), [("llama", "sink"), ("bert", "gate"), ("vit", "conv2d"), ("bart", "beta")])
def test_a_saved_model_comes_back_with_what_it_learned(name: str, each: str, tmp_path: Path) -> None:
    model, given = converted(name, LEARNED[each][0]), inputs(name, tokens())
    model.save_pretrained(tmp_path)
    again = load(tmp_path).eval()
    assert type(again) is type(model)
    assert again.state_dict().keys() == model.state_dict().keys()
    assert torch.equal(logits(again, given), logits(model, given))
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(load(tmp_path / "again").eval(), given), logits(model, given))
    revert(again)
    assert again.state_dict().keys() == model_of(name).state_dict().keys()


def test_a_base_model_loads_what_a_model_with_a_head_saved(tmp_path: Path) -> None:
    model = converted("bert", LEARNED["gate"][0])
    model.save_pretrained(tmp_path)
    base = load(tmp_path, hf.BertModel, add_pooling_layer=False).eval()
    given = inputs("bert", tokens())
    with torch.no_grad():
        torch.testing.assert_close(base(**given).last_hidden_state, model.bert(**given).last_hidden_state)


def test_a_state_dict_goes_from_one_converted_model_to_another() -> None:
    model, other = converted("gpt2", LEARNED["beta"][0]), model_of("gpt2")
    convert(other, LEARNED["beta"][0])
    other.load_state_dict(model.state_dict())
    given = inputs("gpt2", tokens())
    assert torch.equal(logits(other, given), logits(model, given))


def test_what_was_learned_is_not_left_out_in_silence(tmp_path: Path) -> None:
    converted("llama", LEARNED["sink"][0]).save_pretrained(tmp_path / "sink")
    plain = hf.LlamaForCausalLM.from_pretrained(tmp_path / "sink")
    with pytest.raises(ValueError, match=r"learned sink, which from_pretrained left out; use load"):
        convert(plain, "sink")
    converted("llama", mechanism("sh")).save_pretrained(tmp_path / "sh")
    convert(hf.LlamaForCausalLM.from_pretrained(tmp_path / "sh"), "sh")  # which learned nothing
    model_of("llama").save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="names no mechanism"):
        load(tmp_path / "plain")


def test_convert_keeps_every_weight_and_says_what_it_added() -> None:
    model = model_of("llama")
    before = {name: x.clone() for name, x in model.state_dict().items()}
    done = convert(model, mechanism("sink"))
    after = model.state_dict()
    assert all(torch.equal(after[name], x) for name, x in before.items())
    assert done.attentions == ("model.layers.0.self_attn", "model.layers.1.self_attn")
    assert done.added == {f"{name}.primaldual.learned.sink": (4,) for name in done.attentions}
    assert after.keys() == before.keys() | done.added.keys()
    assert str(done) == (
        "LlamaForCausalLM: 2 attentions are 'sink' now; 2 parameters of 8 numbers added, every other weight as it was"
    )


@pytest.mark.parametrize("name", ["bert", "t5"])
@pytest.mark.parametrize("each", ["gate of heads", "sink"])
def test_revert_gives_back_the_model(name: str, each: str) -> None:
    model, given = model_of(name), inputs(name, tokens())
    model.set_attn_implementation("eager")
    before, keys = logits(model, given), model.state_dict().keys()
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    convert(model, LEARNED[each][0])
    assert not torch.allclose(logits(model, given), before, atol=1e-4)
    revert(model)
    assert torch.equal(logits(model, given), before)
    assert model.state_dict().keys() == keys
    assert [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()] == hooks
    assert "primaldual" not in model.config.to_dict()
    with pytest.raises(ValueError, match="is not converted"):
        revert(model)


def test_a_copy_of_a_converted_model_is_another_model() -> None:
    model, given = converted("bert", LEARNED["gate"][0]), inputs("bert", tokens())
    other = copy.deepcopy(model)
    assert torch.equal(logits(other, given), logits(model, given))
    revert(other)
    logits(model, given)


def test_a_model_is_converted_once() -> None:
    model = model_of("bert")
    convert(model, "bn")
    with pytest.raises(ValueError, match="converted already; call revert"):
        convert(model, "sh")
    revert(model)
    assert "'sh'" in str(convert(model, "sh"))


def test_models_of_16_bits_learn_in_them() -> None:
    model = model_of("llama").to(torch.bfloat16)
    convert(model, Primal(inputs=(Recenter(learnable=True),)))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model(input_ids=tokens()).logits.isfinite().all()


def test_autocast_may_leave_queries_in_another_dtype_than_values() -> None:
    model, given = converted("llama", LEARNED["gate"][0]), {"input_ids": tokens(), "use_cache": False}
    expected = logits(model, given)
    with torch.autocast("cpu", torch.bfloat16):
        found = logits(model, given)
        model(**given).logits.float().square().mean().backward()
    assert float((found - expected).norm() / expected.norm()) < 0.05


def test_a_model_that_never_asks_for_an_attention_is_refused_by_name() -> None:
    config = hf.DebertaV2Config(
        vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48
    )
    with pytest.raises(UnsupportedError, match="DebertaV2Model computes its attention itself and never asks"):
        convert(hf.DebertaV2Model(config), "bn")
    with pytest.raises(TypeError, match="model of transformers"):
        convert(torch.nn.Linear(2, 2), "bn")


def test_an_attention_that_transformers_does_not_reach_is_named() -> None:
    model = model_of("llama")
    model.model.layers[1].self_attn.config = copy.deepcopy(model.config)
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedError, match=r"does not reach model\.layers\.1\.self_attn, whose config"):
        convert(model, "sink")
    assert model.config._attn_implementation == before
    assert not [name for name in model.state_dict() if "primaldual" in name]


@pytest.mark.parametrize("each", ["gate", "beta"])
def test_checkpointed_gradients_are_the_same(each: str) -> None:
    def gradients(checkpointed: bool) -> list[torch.Tensor]:
        model = converted("llama", LEARNED[each][0]).train()
        if checkpointed:
            model.activation_checkpointing_enable()
        torch.manual_seed(2)
        model(input_ids=tokens(), use_cache=False).logits.square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    for found, expected in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(found, expected)


def test_residuals_are_the_models() -> None:
    with pytest.raises(UnsupportedError, match="residual=False"):
        convert(model_of("bert"), Primal(residual=True))
