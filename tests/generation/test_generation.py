"""Generating with a cache is the loop without one, token for token."""

import pytest
import torch
from torch import Tensor

from primaldual import Primal, mechanism
from primaldual.generation import Choice, beam_search, generate, left_padded, stream
from primaldual.models import LanguageConfig, LanguageModel
from primaldual.models.language import LanguageBlock
from primaldual.ops import UnsupportedError
from primaldual.primal import DepthwiseConv1d, Forget, Gated, Pooled, Recenter

VOCABULARY = 23
MECHANISMS = {
    "softmax": Primal(),
    "sh": mechanism("sh", scales=(1, 2, 3, 8)),
    "bn+sh": mechanism("bn+sh", learnable=True),
    "conv+gate+sh": Primal(
        normalizer=Gated(), inputs=(DepthwiseConv1d(3, causal=True, channels="each"), Recenter(0.5)),
        training_set=Pooled((1, 1, 2, 4)), weights=Forget(),
    ),
    "linear": mechanism("linear-sh"),
    "sparse": mechanism("sparse", pattern="window"),
}  # fmt: skip


def model_of(name: str = "sh", positions: str = "rotary", layers: int = 2) -> LanguageModel:
    torch.manual_seed(0)
    config = LanguageConfig(
        d_model=32, heads=4, layers=layers, feedforward=48, context=64, positions=positions, vocabulary=VOCABULARY,
        mechanism=MECHANISMS[name],
    )  # fmt: skip
    model = LanguageModel(config).double().eval()
    with torch.no_grad():
        for x in model.parameters():  # so that scores differ, and what a layer learns is away from its start
            x.add_(0.15 * torch.randn_like(x))
    return model


def prompts(rows: int = 2, length: int = 9) -> Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def without_a_cache(model: LanguageModel, tokens: Tensor, max_tokens: int, choice: Choice, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    length = tokens.shape[1]
    for _ in range(max_tokens):
        tokens = torch.cat([tokens, choice(model(tokens)[:, -1], generator)[:, None]], 1)
    return tokens[:, length:]


@torch.no_grad()
def beams_without_a_cache(
    model: LanguageModel, prompt: Tensor, max_tokens: int, beams: int, eos: int | None
) -> tuple[list[int], float]:
    """Of one prompt, with lists: the best of all continuations of the beams, again and again."""
    kept: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(max_tokens):
        more = []
        for total, said in kept:
            if eos is not None and said and said[-1] == eos:
                more.append((total, [*said, eos]))
                continue
            scores = model(torch.cat([prompt, torch.tensor(said, dtype=torch.int64)])[None])[0, -1].log_softmax(-1)
            more += [(total + float(scores[token]), [*said, token]) for token in range(VOCABULARY)]
        kept = sorted(more, key=lambda one: -one[0])[:beams]
        if eos is not None and all(said[-1] == eos for _, said in kept):
            break
    return kept[0][1], kept[0][0]


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("choice", [Choice(), Choice(1.0), Choice(0.7, 0.8)], ids=["greedy", "drawn", "top-p"])
def test_tokens_are_those_of_the_loop_without_a_cache(name: str, choice: Choice) -> None:
    model, tokens = model_of(name), prompts()
    expected = without_a_cache(model, tokens, 14, choice, seed=3)
    for piece in (None, 4):
        given = {"temperature": choice.temperature, "top_p": choice.top_p, "seed": 3, "piece": piece}
        found = generate(model, tokens, max_tokens=14, **given)
        assert torch.equal(found.tokens, expected)
        assert found.cache.lengths.tolist() == [9 + 13] * 2
    assert len(set(expected.flatten().tolist())) > 3
    if choice == Choice():
        scores = model(torch.cat([tokens, expected], 1))[:, 8:-1]
        assert torch.equal(expected, scores.argmax(-1))


@pytest.mark.parametrize("name", ["softmax", "sh", "conv+gate+sh"])
@pytest.mark.parametrize("eos", [None, 5])
def test_four_beams_are_those_of_the_search_without_a_cache(name: str, eos: int | None) -> None:
    model, (tokens, padding) = model_of(name), left_padded([prompts()[0], prompts()[1, :5]])
    found, totals = beam_search(model, tokens, max_tokens=7, num_beams=4, eos=eos, padding=padding, piece=4)
    for row, prompt in enumerate((prompts()[0], prompts()[1, :5])):
        expected, total = beams_without_a_cache(model, prompt, 7, 4, eos)
        assert found[row, : len(expected)].tolist() == expected
        assert abs(float(totals[row]) - total) < 1e-9
        assert set(found[row, len(expected) :].tolist()) <= {eos}
    assert torch.equal(generate(model, tokens, max_tokens=7, num_beams=4, eos=eos, padding=padding).tokens, found)


@pytest.mark.parametrize("positions", ["rotary", "learned", "none"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_prompts_of_several_lengths_go_on_as_each_alone(positions: str, side: str) -> None:
    model, rows = model_of("bn+sh", positions), [prompts()[0], prompts()[1, :3], prompts()[0, 2:8]]
    tokens, padding = left_padded(rows)
    if side == "right":
        tokens, padding = (torch.stack([x.roll(len(row), 0) for x, row in zip(y, rows, strict=True)])
                           for y in (tokens, padding))  # fmt: skip
    found = generate(model, tokens, max_tokens=9, padding=padding, piece=4).tokens
    for row, prompt in enumerate(rows):
        assert found[row].tolist() == without_a_cache(model, prompt[None], 9, Choice())[0].tolist()


def test_a_row_that_has_ended_stays_ended() -> None:
    model, tokens = model_of(), prompts(3)
    free = generate(model, tokens, max_tokens=12).tokens
    eos = int(free[0, 2])
    found = generate(model, tokens, max_tokens=12, eos=eos).tokens
    for row in range(3):
        said = free[row].tolist()
        end = said.index(eos) if eos in said else len(said)
        assert found[row, : end + 1].tolist() == said[: end + 1][: found.shape[1]]
        assert set(found[row, end:].tolist()) <= {eos}
    assert len(list(stream(model, tokens[:1], max_tokens=12, eos=eos))) == free[0].tolist().index(eos) + 1


def test_what_was_wrong_is_cropped_and_generated_anew() -> None:
    model, tokens = model_of(), prompts()
    cache = model.cache(2, rewind=6)
    scores = model.decode(tokens, cache, last=True)
    for _ in range(5):
        scores = model.decode(prompts(2, 1), cache, last=True)
    cache.crop(8)
    model.decode(tokens[:, 8:], cache)
    other = torch.tensor([[3], [4]])
    expected = without_a_cache(model, torch.cat([tokens, other], 1), 6, Choice())
    assert torch.equal(generate(model, other, max_tokens=6, cache=cache).tokens, expected)
    assert scores.shape == (2, VOCABULARY)


def test_a_stated_length_gives_the_same_and_compiles() -> None:
    model, tokens = model_of("bn+sh"), prompts()
    expected = generate(model, tokens, max_tokens=10).tokens
    cache = model.cache(2, length=20)
    assert torch.equal(generate(model, tokens, max_tokens=10, cache=cache).tokens, expected)
    cache.reset()
    scores = model.decode(tokens, cache, last=True)
    step = torch.compile(lambda x: model.decode(x, cache, last=True), backend="eager", fullgraph=True)
    found = []
    for _ in range(10):
        found.append(scores.argmax(-1))
        scores = step(found[-1][:, None])
    assert torch.equal(torch.stack(found, 1), expected)


def test_the_cache_of_a_model_says_its_size() -> None:
    config = LanguageConfig(
        d_model=64, heads=8, layers=3, feedforward=64, vocabulary=9,
        mechanism=mechanism("sh", scales=(1, 1, 2, 2, 4, 4, 8, 8)),
    )  # fmt: skip
    cache = LanguageModel(config).cache(2, length=8192)
    assert cache.full_bytes == 2 * 3 * 8192 * 64 * 2 * 4
    assert 0.4687 < cache.bytes / cache.full_bytes < 0.4695


def test_drawing_is_by_the_probabilities() -> None:
    scores = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(40_000, -1)
    generator = torch.Generator().manual_seed(0)
    for choice in (Choice(1.0), Choice(2.0), Choice(1.0, 0.8)):
        share = choice(scores, generator).bincount(minlength=4) / 40_000
        expected = choice.probabilities(scores[:1])[0]
        torch.testing.assert_close(share.double(), expected / expected.sum(), atol=0.01, rtol=0)
    assert Choice(1.0, 0.8).probabilities(scores[:1])[0].gt(0).tolist() == [True, True, False, False]
    assert Choice(1.0, 1e-9)(scores[:5], generator).tolist() == [0] * 5


def test_bad_arguments_are_refused_with_what_to_do() -> None:
    model, tokens = model_of(), prompts()
    for given, said in (
        ({"temperature": -1}, "temperature must be"), ({"temperature": 1, "top_p": 0}, "top_p must be"),
        ({"top_p": 0.5}, "give a temperature over 0"), ({"max_tokens": -1}, "max_tokens must be"),
        ({"num_beams": 0}, "num_beams must be"), ({"num_beams": 2, "temperature": 1.0}, "draws nothing"),
        ({"piece": 0}, "piece must be"), ({"padding": torch.ones(2, 9, dtype=torch.bool)}, "padding alone"),
        ({"padding": torch.ones(2, 9)}, "padding must be boolean"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            generate(model, tokens, **({"max_tokens": 3} | given))
    for wrong, said in ((tokens.float(), "tokens must be int64"), (tokens[0], "tokens must be"),
                        (tokens + VOCABULARY, "those of the model")):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            generate(model, wrong, max_tokens=3)
    with pytest.raises(ValueError, match="at least one token each"):
        left_padded([[1], []])
    with pytest.raises(ValueError, match="a cache of 3 rows"):
        generate(model, tokens, max_tokens=3, cache=model.cache(3))
    with pytest.raises(ValueError, match="learned positions for 64 tokens"):
        generate(model_of("softmax", "learned"), tokens, max_tokens=60)


def test_a_model_with_a_forward_of_its_own_is_refused() -> None:
    class Other(LanguageBlock):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.flip(-1))

    model = model_of()
    model.layers[1].__class__ = Other
    with pytest.raises(UnsupportedError, match="Other has a forward of its own"):
        generate(model, prompts(), max_tokens=3)
