"""The language model: nothing comes from later tokens, and every part is what its formula says."""

import re
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import silu

from primaldual import attention
from primaldual.models import LANGUAGE_SIZES, LanguageConfig, LanguageModel, LanguageSizes
from primaldual.primal import DepthwiseConv1d, Primal, RmsNorm, Rotary, mechanism, mechanisms

TINY = LanguageSizes(d_model=16, heads=2, layers=2, feedforward=24, context=24)
CAUSAL = [name for name in mechanisms() if mechanism(name).causal_refusal(2) is None]


def model_of(name: str = "softmax", sizes: LanguageSizes = TINY) -> LanguageModel:
    """In float64, with weights that are large enough for every part to matter."""
    model = LanguageModel(sizes.config(256, name)).double()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("name", CAUSAL)
def test_a_later_byte_changes_no_earlier_score(name):
    model = model_of(name)
    text = torch.randint(256, (2, 24))
    before = model(text)
    for place in (1, 13, 23):
        changed = text.clone()
        changed[:, place] = (changed[:, place] + 1) % 256
        after = model(changed)
        torch.testing.assert_close(after[:, :place], before[:, :place], rtol=1e-12, atol=1e-12)
        assert not torch.allclose(after[:, place], before[:, place], rtol=1e-3)


@pytest.mark.parametrize("name", CAUSAL)
def test_the_beginning_of_a_text_alone_has_the_scores_that_it_has_in_the_whole(name):
    model = model_of(name)
    text = torch.randint(256, (2, 24))
    torch.testing.assert_close(model(text[:, :13]), model(text)[:, :13], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("positions", ["rotary", "learned", "none"])
def test_the_scores_are_those_of_the_formula(positions):
    model = model_of("bn+sh", LanguageSizes(16, 2, 2, 24, 24, positions))
    text = torch.randint(256, (2, 24))
    w = dict(model.named_parameters())

    def norm(x, gain):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain

    x = w["tokens.weight"][text]
    if positions == "learned":
        x = x + w["positions"]
    for i in range(2):
        layer = {name.removeprefix(f"layers.{i}."): p for name, p in w.items()}
        projected = norm(x, layer["norm1.weight"]) @ layer["self_attn.in_proj_weight"].T
        q, k, v = (one.unflatten(-1, (2, 8)).transpose(1, 2) for one in projected.chunk(3, -1))
        named = mechanism("bn+sh", rotary=positions == "rotary")
        heads = attention(q, k, v, named, is_causal=True, impl="reference")
        x = x + heads.transpose(1, 2).flatten(2) @ layer["self_attn.out_proj.weight"].T
        z = norm(x, layer["norm2.weight"])
        gate, up = layer["gate_and_up.weight"].chunk(2)
        x = x + (silu(z @ gate.T) * (z @ up.T)) @ layer["down.weight"].T
    expected = norm(x, w["norm.weight"]) @ w["tokens.weight"].T
    torch.testing.assert_close(model(text), expected, rtol=1e-10, atol=1e-10)


def test_the_named_sizes_have_the_parameters_that_are_said():
    said = dict(re.findall(r"^ +(\w+)(?: +[\d]+){4} +([\d,]+)$", LanguageSizes.__doc__, re.MULTILINE))
    assert set(said) == set(LANGUAGE_SIZES)
    for name, sizes in LANGUAGE_SIZES.items():
        d, f = sizes.d_model, sizes.feedforward
        counted = sizes.layers * (4 * d * d + 3 * d * f + 2 * d) + d + 256 * d
        with torch.device("meta"):
            model = LanguageModel(sizes.config(256))
        parameters = sum(p.numel() for name, p in model.named_parameters() if name != "positions")
        assert parameters == counted == int(said[name].replace(",", ""))
    assert 300e6 < counted < 350e6


def test_in_16_bits_the_sum_of_the_layers_stays_in_float32():
    model = LanguageModel(TINY.config(256)).bfloat16()
    seen = []
    for layer in model.layers:
        layer.register_forward_hook(lambda layer, given, found: seen.append(found.dtype))
    assert model(torch.randint(256, (1, 5))).dtype == torch.bfloat16
    assert seen == [torch.float32, torch.float32]


def test_a_model_starts_with_bytes_almost_equally_likely():
    scores = LanguageModel(TINY.config(256))(torch.randint(256, (4, 24)))
    assert scores.std() < 0.5


@pytest.mark.parametrize(
    ("name", "message"), [("conv1d", "looks ahead"), ("linear-bn", "does not re-associate")], ids=["conv", "linear"]
)
def test_a_mechanism_without_a_causal_form_is_refused(name, message):
    with pytest.raises(ValueError, match=f"causal form.*{message}"):
        LanguageConfig(vocabulary=256, mechanism=name)


def test_a_text_that_is_too_long_is_refused():
    text = torch.zeros(1, 25, dtype=torch.long)
    with pytest.raises(ValueError, match=r"at most 24.*\[1, 25\]"):
        model_of(sizes=replace(TINY, positions="learned"))(text)
    assert model_of()(text).shape == (1, 25, 256)  # rotary positions have no end


def test_rotary_positions_are_a_part_of_the_mechanism_after_its_convolutions():
    own = Primal(inputs=(DepthwiseConv1d(3, causal=True), RmsNorm()))
    stated = TINY.config(256, own)
    assert stated.mechanism == own
    assert stated.primal.inputs == (DepthwiseConv1d(3, causal=True), Rotary(), RmsNorm())
    slow = Primal(inputs=(Rotary(base=500.0),))
    assert TINY.config(256, slow).primal == slow
    assert LanguageModel(stated).layers[1].self_attn.primal == stated.primal
