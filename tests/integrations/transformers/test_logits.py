"""Models of transformers with a registered mechanism compute that mechanism."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from integrations.transformers.tiny import CAUSAL, MODELS, TWO_SIDED, inputs, logits, model_of, padded, tokens
from primaldual import Primal, mechanism, mechanisms
from primaldual.integrations.transformers import register
from primaldual.integrations.transformers.call import attend
from primaldual.primal import Fixed

ENCODER = ("softmax", "bn", "sh", "bn+sh", "linear", "linear-bn+sh", "blocks", "alibi+sh", "gaussian", "polynomial")
DECODER = (
    "softmax",
    "bn",
    "sh",
    "bn+sh",
    "linear",
    "linear-sh",
    "blocks",
    "sparse-bn+sh",
    "alibi+sh",
    "gaussian",
    "polynomial",
)
ACROSS = {"bart": ("softmax", "bn", "sh", "bn+sh", "linear", "linear-sh"), "t5": ("softmax", "bn")}
PAIRS = [
    (name, each) for name in MODELS for each in ACROSS.get(name, DECODER if name in CAUSAL else ENCODER)
]  # fmt: skip
PADDED = [(*pair, "right") for pair in PAIRS if pair[0] != "vit"]
PADDED += [(*pair, "left") for pair in PAIRS if pair[0] not in ("vit", "t5")]  # T5 counts what is padding, too


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    register()
    for each in mechanisms():
        register(f"reference-{each}", each, impl="reference")
    for prefix, impl in (("primaldual", "auto"), ("reference", "reference")):
        register(f"{prefix}-blocks", mechanism("sparse", pattern=Fixed(5, 1)), impl=impl)


@pytest.mark.parametrize(("name", "each"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_logits_are_those_of_the_reference(name: str, each: str) -> None:
    model, given = model_of(name), inputs(name, tokens())
    model.set_attn_implementation("eager")
    plain = logits(model, given)
    model.set_attn_implementation(f"reference-{each}")
    reference = logits(model, given)
    model.set_attn_implementation(f"primaldual-{each}")
    torch.testing.assert_close(logits(model, given), reference, rtol=1e-5, atol=1e-5)
    assert torch.allclose(plain, reference, atol=1e-4) == (each == "softmax")


@pytest.mark.parametrize(("name", "each", "side"), PADDED, ids=["-".join(one) for one in PADDED])
def test_padding_on_either_side_is_a_sequence_alone(name: str, each: str, side: str) -> None:
    model = model_of(name).double()
    model.set_attn_implementation(f"primaldual-{each}")
    rows = [tokens(1, length)[0] for length in (13, 8, 1)]
    if name == "bart" and side == "left":
        model.get_encoder().embed_positions.weight.data.zero_()
    together = logits(model, inputs(name, *padded(rows, side)))
    for row, found in zip(rows, together, strict=True):
        alone = logits(model, inputs(name, row[None]))[0]
        if name not in TWO_SIDED:
            found = found[-len(row) :] if side == "left" else found[: len(row)]
        torch.testing.assert_close(found, alone, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "vit"])
def test_softmax_is_transformers_own_with_padding(name: str) -> None:
    model = model_of(name)
    ids, mask = padded([tokens(1, 13)[0], tokens(1, 8)[0]], "right")
    given = inputs(name, ids, mask)
    model.set_attn_implementation("eager")
    expected = logits(model, given)
    model.set_attn_implementation("primaldual-softmax")
    found = logits(model, given)
    if name not in TWO_SIDED:  # what stands at padding is no one's
        expected, found = expected[mask.bool()], found[mask.bool()]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_primal_of_ones_own_has_the_name_that_it_is_given() -> None:
    patches = mechanism("bn+sh", beta=0.6, grid=(4, 4), prefix=1)
    assert register("patches", patches) == ("patches",)
    register("patches-reference", patches, impl="reference")
    model, given = model_of("vit"), inputs("vit", tokens())
    model.set_attn_implementation("patches")
    found = logits(model, given)
    model.set_attn_implementation("patches-reference")
    torch.testing.assert_close(found, logits(model, given), rtol=1e-5, atol=1e-5)
    model.set_attn_implementation("primaldual-bn+sh")
    assert not torch.allclose(found, logits(model, given), atol=1e-4)


def test_a_model_is_made_and_loaded_with_a_name(tmp_path: Path) -> None:
    model, given = model_of("llama"), inputs("llama", tokens())
    model.set_attn_implementation("primaldual-bn+sh")
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="primaldual-bn+sh").eval()
    assert torch.equal(logits(loaded, given), logits(model, given))
    with pytest.raises(ValueError, match="primaldual-nothing"):
        type(model).from_pretrained(tmp_path, attn_implementation="primaldual-nothing")


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_gradients_are_those_of_eager_and_of_the_reference(name: str) -> None:
    def gradients(implementation: str) -> list[torch.Tensor]:
        model = model_of(name)
        model.set_attn_implementation(implementation)
        torch.manual_seed(1)
        ids, mask = padded([tokens(1, 13)[0], tokens(1, 8)[0]], "left")
        given = inputs(name, ids, mask)
        model(**given).logits[mask.bool()].square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None and p.grad.abs().max() > 1e-6]

    for ours, theirs in (("primaldual-softmax", "eager"), ("primaldual-bn+sh", "reference-bn+sh")):
        for found, expected in zip(gradients(ours), gradients(theirs), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def test_dropout_acts_in_training_alone() -> None:
    model = model_of("llama")
    model.set_attn_implementation("primaldual-bn")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    given = inputs("llama", tokens())
    assert torch.equal(logits(model, given), logits(model, given))
    model.train()
    assert not torch.allclose(logits(model, given), logits(model, given))


def test_dropout_that_a_model_hands_over_in_evaluation_is_left_out() -> None:
    attention = torch.nn.Module().eval()
    q = torch.randn(1, 2, 5, 8)
    found = [attend(attention, q, q, q, None, Primal(), dropout=p, is_causal=True)[0] for p in (0.0, 0.9)]
    assert torch.equal(*found)


def test_weights_are_returned_where_they_are_asked_for() -> None:
    model, given = model_of("bert"), inputs("bert", tokens())
    model.set_attn_implementation("eager")
    expected = model(**given, output_attentions=True).attentions
    model.set_attn_implementation("primaldual-softmax")
    for found, theirs in zip(model(**given, output_attentions=True).attentions, expected, strict=True):
        torch.testing.assert_close(found, theirs)
