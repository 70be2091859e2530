"""`primaldual generate`: text of what train-text left, as it comes, with its speed and the size of its cache."""

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from primaldual.cli import app
from primaldual.data.text import Bytes, Subwords
from primaldual.data.text.decoding import ByteDecoder, SubwordDecoder
from primaldual.generation import generate
from primaldual.models import LANGUAGE_SIZES, LanguageConfig, LanguageModel, LanguageSizes, SeriesConfig
from primaldual.training import Store
from primaldual.training.model_file import Models, write

LICENSE = Path(__file__).parents[2] / "LICENSE"
QUICK = ("--size", "tiny", "--context", 32, "--steps", 4, "--batch-size", 4, "--evaluate-every", 2, "--device", "cpu")

pytestmark = pytest.mark.usefixtures("cache")


def call(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["generate", *map(str, arguments)])


def saved(folder: Path, vocabulary: int = 256, **given) -> tuple[Path, LanguageModel]:
    torch.manual_seed(0)
    config = LanguageConfig(
        d_model=32, heads=8, layers=1, feedforward=32, vocabulary=vocabulary, **({"mechanism": "sh"} | given)
    )
    model = LanguageModel(config).eval()
    with torch.no_grad():
        for x in model.parameters():
            x.add_(0.2 * torch.randn_like(x))
    write(folder / "model.safetensors", Models([config], [model.state_dict()]))
    return folder / "model.safetensors", model


def test_what_was_trained_generates(tmp_path, monkeypatch):
    monkeypatch.setitem(LANGUAGE_SIZES, "tiny", LanguageSizes(16, 2, 1, 24))
    arguments = ["train-text", LICENSE, "--mechanism", "sh", "--scales", "1,2", "--output", tmp_path, *QUICK]
    assert CliRunner().invoke(app, list(map(str, arguments))).exit_code == 0
    result = call(tmp_path, "--prompt", "Licensed", "--max-tokens", 20, "--device", "cpu")
    assert result.exit_code == 0, result.output
    (record,) = Store(tmp_path).records()
    tokens = torch.tensor([[0, *b"Licensed"]])
    expected = generate(Store(tmp_path).model(record.key), tokens, max_tokens=20, eos=0).tokens[0].tolist()
    said = bytes(token for token in expected if token).decode("utf-8", "replace")
    assert result.stdout == f"Licensed{said}\n"
    assert re.search(
        rf"{len(expected)} tokens.*prompt of 9 in .* s\); cache .*B, 0\.\d\d of one of every", result.stderr
    )


def test_drawing_repeats_with_its_seed_and_differs_with_another(tmp_path):
    path, _ = saved(tmp_path)
    options = ("--temperature", 1, "--top-p", 0.95, "--max-tokens", 30)
    first, again, other = (call(path, *options, "--seed", seed).stdout for seed in (1, 1, 2))
    assert first == again != other and len(first) > 5


def test_the_cache_of_scaled_heads_is_less_than_half(tmp_path):
    path, _ = saved(tmp_path, mechanism="sh", context=4096)
    result = call(path, "--prompt", "a" * 3000, "--max-tokens", 2)
    assert "0.47 of one of every token and head" in result.stderr, result.output


def test_letters_come_whole():
    for make, tokens in ((ByteDecoder, "aéß…😀\n".encode()), (None, "aéß…😀\n".encode())):
        decoder = make() if make else SubwordDecoder(lambda ids: bytes(ids).decode("utf-8", "replace"))
        said = [decoder.add(token) for token in tokens]
        assert [one for one in said if one] == list("aéß…😀\n") and decoder.end() == ""
    decoder = ByteDecoder()
    assert [decoder.add(0xE2), decoder.add(ord("a")), decoder.add(0xC3), decoder.end()] == ["", "\ufffda", "", "\ufffd"]


def test_a_tokenizer_is_held_against_the_model(tmp_path):
    library = pytest.importorskip("tokenizers")
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer, made.decoder = library.pre_tokenizers.ByteLevel(), library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [LICENSE.read_text()], library.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet)
    )
    made.save(str(tmp_path / "bpe.json"))
    words = Subwords(tmp_path / "bpe.json")
    text = "the Licensor grants – naïvely – 😀"
    decoder = words.decoder()
    said = "".join(decoder.add(token) for token in words.encode(text.encode(), "it").tolist()) + decoder.end()
    assert said.strip() == text
    path, _ = saved(tmp_path, words.vocabulary)
    options = ("--tokenizer", tmp_path / "bpe.json", "--prompt", "the", "--max-tokens", 5)
    assert call(path, *options).exit_code == 0
    result = call(path)
    assert result.exit_code == 1 and "knows 301 tokens, and bytes has 256; give its tokenizer" in result.stderr
    assert Bytes().vocabulary == 256


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (("--temperature", -1), 2, "temperature must be a finite number of at least 0"),
        (("--top-p", 0.5), 2, "give a temperature over 0 with it"),
        (("--dtype", "int8"), 2, "--dtype must be one of float32, bfloat16, float64"),
        (("--tokenizer", "none.json"), 1, "there is no file none.json"),
        (("--prompt", "a\0b"), 1, "there is a byte 0 in it"),
        (("--max-tokens", 60), 1, "learned positions for 32 tokens"),
    ],
)
def test_errors_say_what_to_do(tmp_path, options, status, message):
    path, _ = saved(tmp_path, positions="learned", context=32)
    result = call(path, *options)
    assert result.exit_code == status and message in result.stderr, result.output


def test_a_file_that_is_no_language_model_is_refused_by_name(tmp_path):
    assert "there is no file" in call(tmp_path / "none.safetensors").stderr
    assert "holds 0 models" in call(tmp_path).stderr
    (tmp_path / "bad.safetensors").write_bytes(b"no model")
    result = call(tmp_path / "bad.safetensors")
    assert result.exit_code == 1 and "bad.safetensors" in result.stderr
    config = SeriesConfig(channels=1, length=8, outputs=2)
    write(tmp_path / "series.safetensors", Models([config], [{}]))
    result = call(tmp_path / "series.safetensors")
    assert result.exit_code == 1 and "is a model of SeriesConfig, and not a language model" in result.stderr
    assert "holds 2 models" in call(tmp_path).stderr


def test_a_mechanism_that_cannot_be_decoded_is_refused_before_the_first_token(tmp_path, monkeypatch):
    path, _ = saved(tmp_path)
    monkeypatch.setattr("primaldual.ops.decoding.refusals.refusal", lambda primal, heads: "it looks at the moon")
    result = call(path, "--prompt", "Once")
    assert result.exit_code == 1 and "cannot be decoded with a cache: it looks at the moon" in result.stderr
    assert "Once" not in result.stdout


def test_help_has_examples():
    result = call("--help")
    assert result.exit_code == 0 and "primaldual generate primaldual-runs --prompt" in result.stdout
