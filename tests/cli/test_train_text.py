"""`primaldual train-text`: a language model of one's own text, in one command."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from primaldual.cli import app
from primaldual.models import LANGUAGE_SIZES, LanguageModel, LanguageSizes
from primaldual.training import Store, Training

LICENSE = Path(__file__).parents[2] / "LICENSE"
QUICK = ("--size", "tiny", "--context", 32, "--steps", 4, "--batch-size", 4, "--evaluate-every", 2, "--device", "cpu")

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(autouse=True)
def smaller(monkeypatch):
    """The tiny size, shrunk."""
    monkeypatch.setitem(LANGUAGE_SIZES, "tiny", LanguageSizes(16, 2, 1, 24))


def call(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["train-text", *map(str, arguments)])


def test_a_file_is_trained_on_and_recorded(tmp_path):
    result = call(LICENSE, "--mechanism", "sh", "--scales", "1,2", "--seeds", 2, "--output", tmp_path, *QUICK)
    assert result.exit_code == 0, result.output
    records = sorted(Store(tmp_path).records(), key=lambda record: record.seed)
    assert [record.seed for record in records] == [0, 1] and [r.members for r in records] == [[0], [1]]
    for record in records:
        assert record.mechanism["training_set"]["scales"] == [1, 2] and record.recipe["dtype"] == "float32"
        assert record.recipe["model"]["context"] == 32 and record.last.at == 4 and record.speed["tokens_per_second"] > 0
        assert f"{record.last.value:.4f} (step 4)" in result.stdout
        assert type(Store(tmp_path).model(record.key)) is LanguageModel
    assert "bits per byte" in result.stdout and "mean ± std" in result.stdout
    assert f"{records[0].parameters:,} parameters" in result.stdout
    again = call(LICENSE, "--mechanism", "sh", "--scales", "1,2", "--seeds", 2, "--output", tmp_path, *QUICK)
    assert again.exit_code == 0 and sorted(Store(tmp_path).records(), key=lambda r: r.seed) == records


def test_a_stopped_run_goes_on(tmp_path, monkeypatch):
    whole = call(LICENSE, "--output", tmp_path / "whole", *QUICK)
    assert whole.exit_code == 0, whole.output
    train_batch = Training.train_batch

    def stopped(self):
        if self.step == 3:
            raise KeyboardInterrupt
        train_batch(self)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "train_batch", stopped)
        first = call(LICENSE, "--output", tmp_path / "runs", *QUICK)
        assert first.exit_code == 130 and "goes on from the last checkpoint" in first.stderr
    assert call(LICENSE, "--output", tmp_path / "runs", *QUICK).exit_code == 0
    found = [Store(tmp_path / folder).records()[0] for folder in ("whole", "runs")]
    assert found[0].history == found[1].history and found[0].key == found[1].key


def test_the_size_of_a_kernel_has_another_name_here(tmp_path):
    options = ("--mechanism", "conv1d", "--causal", "--kernel-size", "3", "--output", tmp_path, *QUICK)
    assert call(LICENSE, *options).exit_code == 0
    (record,) = Store(tmp_path).records()
    assert record.mechanism["inputs"] == [{"kind": "DepthwiseConv1d", "size": 3, "causal": True}]


def test_a_folder_and_a_tokenizer(tmp_path):
    library = pytest.importorskip("tokenizers")
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(50):
        (folder / f"{i}.txt").write_text(f"this is text number {i} of fifty, and it says nothing but this.")
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [LICENSE.read_text()], library.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet)
    )
    made.save(str(tmp_path / "bpe.json"))
    options = [*QUICK, "--context", 8, "--tokenizer", tmp_path / "bpe.json", "--output", tmp_path / "runs"]
    result = call(folder, *options)
    assert result.exit_code == 0, result.output
    (record,) = Store(tmp_path / "runs").records()
    assert re.fullmatch(r"texts-bpe-\w{8}", record.data["name"]) and record.data["train"] == 46
    assert Store(tmp_path / "runs").model(record.key).config.vocabulary == 301


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("none.txt",), 1, "there is no text none.txt: neither a file nor a folder"),
        ((LICENSE, "--mechanism", "conv1d"), 2, "looks ahead; DepthwiseConv1d(size, causal=True) does not"),
        ((LICENSE, "--size", "larg"), 2, "unknown size 'larg'; did you mean 'large'?"),
        ((LICENSE, "--context", 1024), 2, "the validation part has 569 tokens to predict, a window 1024"),
        ((LICENSE, "--positions", "sine"), 2, "positions must be one of"),
        ((LICENSE, "--tokenizer", "none.json"), 1, "there is no file none.json"),
        (("text-imdb",), 1, "get aclImdb_v1.tar.gz from https"),
    ],
)
def test_errors_are_one_line_that_says_what_to_do(tmp_path, arguments, status, message):
    result = call(*arguments, *(one for one in ("--output", tmp_path, "--device", "cpu")))
    assert result.exit_code == status, result.output
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ") and message in line
    assert not list(tmp_path.glob("*.json"))
