"""Mutated inputs: every one loads rightly or ends in the library's own error, and none changes a result silently.

`PRIMALDUAL_MUTANTS=1000 pytest tests/fuzz -m deep` takes so many of each kind; the count is shown by `-s`.
"""

import json
import logging
import os
import resource
import shutil
import signal
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data import files as series
from primaldual import attention, derive, mechanism
from primaldual.base import tensors
from primaldual.base.tensors import DamagedFileError
from primaldual.data import CacheError, DataError, Dataset, cache, load_files
from primaldual.data.sources import Source
from primaldual.paper import compare
from primaldual.primal import DepthwiseConv1d, Laplace, Primal, Rotary, Scale
from primaldual.training import Record, RecordError, Store, train
from primaldual.training.model_file import ModelFileError
from primaldual.training.predictor import Predictor
from support import mutants
from training.toy import small, toy

MUTANTS = int(os.environ.get("PRIMALDUAL_MUTANTS", "60"))
SECONDS = 20
"""That any one input may take."""
MEMORY = 600 << 20
"""Bytes that a kind of input may add to what the process has held at most."""

pytestmark = [pytest.mark.deep, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def without_log() -> Iterator[None]:
    """It would be thousands of lines."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@contextmanager
def in_time(what: object) -> Iterator[None]:
    """An error after SECONDS."""

    def late(*_: object) -> None:
        raise TimeoutError(f"{SECONDS} s and no end: {what!r}"[:500])

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def held() -> int:
    """Bytes at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# the last input of most kinds is as it was, so that not all are refused


def go_through(name: str, inputs: Iterable[Any], read: Callable[[Any], str], own: tuple[type[Exception], ...]) -> None:
    """Every input is read, in a word, or refused by an error of the library."""
    found: Counter[str] = Counter()
    before = held()
    for i, one in enumerate(inputs):
        with in_time(one):
            try:
                found[read(one)] += 1
            except own as error:
                assert str(error)
                found["refused"] += 1
            except Exception as error:
                error.add_note(f"{name}, input {i}: {one!r}"[:3000])
                raise
    grown = held() - before
    print(f"\n{name}: {found.total()} inputs, {dict(found)}, {grown >> 20} MiB more held at most")
    assert grown < MEMORY
    assert len(found) > 1  # some are refused, and some are not


def sound(data: Dataset) -> str:
    """A set that a model can be trained on."""
    for part in (data.train, data.test):
        assert part.x.shape[1:] == data.train.x.shape[1:] and len(part.x) == len(part.y) == len(part.lengths)
        assert not part.x.isinf().any()
    return "loaded"


STAMPED = series.HEADER.replace("@timeStamps false", "@timeStamps true").format(equal="false")


@pytest.mark.parametrize("stamped", [False, True], ids=["plain", "time stamps"])
def test_series(tmp_path, stamped):
    rows = ("(0,1),(1,2.5):(0,1),(1,?):A", "(0,1),(1,2):(0,-1e3),(1,0):b") if stamped else series.ROWS
    text = STAMPED + "\n".join(rows) if stamped else series.text(*rows * 3, equal=False)
    path = tmp_path / "x.ts"

    def read(content: bytes) -> str:
        path.write_bytes(content)
        return sound(load_files(path))

    go_through(".ts", mutants.of_bytes(text.encode(), MUTANTS), read, (DataError,))


@pytest.mark.parametrize("packing", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_zip(tmp_path, packing):
    path = tmp_path / "Toy.zip"
    with zipfile.ZipFile(path, "w", packing) as stream:
        for part in ("TRAIN", "TEST"):
            stream.writestr(f"Toy_{part}.ts", series.text())
    whole, source = path.read_bytes(), Source("Toy", (path,), "")
    expected = [source.read(part) for part in ("TRAIN", "TEST")]

    def read(content: bytes) -> str:
        path.write_bytes(content)
        for part, other in zip(("TRAIN", "TEST"), expected, strict=True):
            found = source.read(part)
            assert found.labels == other.labels
            for one, two in zip(found.series, other.series, strict=True):
                np.testing.assert_array_equal(one, two)
        return "the same"

    go_through("zip", [*mutants.of_bytes(whole, MUTANTS // 4 + 1), whole], read, (DataError,))


@pytest.fixture
def cached(tmp_path) -> Path:
    data = replace(toy(), name="Toy", notes=("a note",), origin="here", source_hash="0" * 64)
    cache.write(data, path := tmp_path / "Toy.safetensors")
    return path


def test_cache(cached):
    whole, expected = cached.read_bytes(), cache.read(cached)

    def read(content: bytes) -> str:
        cached.write_bytes(content)
        found = cache.read(cached)
        assert all(getattr(found, n) == getattr(expected, n) for n in ("name", "notes", "longest", "origin", "hash"))
        return "the same"

    go_through("cache", [*of_header(whole), *mutants.of_bytes(whole, MUTANTS), whole], read, (CacheError,))


def test_cache_whose_checksum_is_right(cached):
    held_tensors, about = tensors.read(cached)

    def read(mutant: Any) -> str:
        tensors.write(cached, held_tensors, mutant)
        return sound(cache.read(cached))

    go_through("cache, JSON", dicts(about), read, (CacheError,))


def of_header(whole: bytes) -> Iterator[bytes]:
    """Changes of one character in a safetensors header, which is where most of the meaning is."""
    end = 8 + int.from_bytes(whole[:8], "little")
    for changed in mutants.of_bytes(whole[8:end], MUTANTS, seed=1):
        if len(changed) == end - 8:
            yield whole[:8] + changed + whole[end:]
        else:
            yield len(changed).to_bytes(8, "little") + changed + whole[end:]


def dicts(about: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Mutated JSON, and at last itself."""
    yield from (one for one in mutants.of_json(about, MUTANTS) if isinstance(one, dict))
    yield about


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder of runs."""
    folder = tmp_path_factory.mktemp("runs")
    train(toy(), "bn+sh", small(dropout=0.2, validation=0.2), (0,), folder=folder)
    return folder


def test_model(trained, tmp_path):
    (source,) = (trained / "models").iterdir()
    path, whole = tmp_path / "model", source.read_bytes()
    steps = [x.numpy() for x in toy().test.x]
    expected = Predictor.load(source).probabilities(steps)

    def read(content: bytes) -> str:
        path.write_bytes(content)
        np.testing.assert_array_equal(Predictor.load(path).probabilities(steps), expected)
        return "the same"

    go_through("model", [*of_header(whole), *mutants.of_bytes(whole, MUTANTS), whole], read, (ModelFileError,))


def test_model_whose_checksum_is_right(trained, tmp_path):
    (source,) = (trained / "models").iterdir()
    held_tensors, about = tensors.read(source)
    steps = [x.numpy() for x in toy().test.x]

    def read(mutant: Any) -> str:
        tensors.write(tmp_path / "model", held_tensors, mutant)
        found = Predictor.load(tmp_path / "model").probabilities(steps)
        assert found.shape == (len(steps), 3)
        return "loaded"

    go_through("model, JSON", dicts(about), read, (ModelFileError,))


@pytest.fixture(scope="module", params=["modern", "paper"])
def estimator(request: Any, tmp_path_factory) -> tuple[Path, np.ndarray, np.ndarray]:
    """A saved one, series, and what it says of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("aeon")
    from integrations.estimators import PAPER, TINY
    from primaldual.integrations.aeon import AttentionClassifier

    path = tmp_path_factory.mktemp("estimator") / "model"
    X = np.random.default_rng(0).normal(size=(16, 2, 12))
    given: dict[str, Any] = {"modern": TINY, "paper": PAPER}[request.param]
    model = AttentionClassifier(
        mechanism("bn+sh"), **given, n_members=2, class_weight={"a": 1.0, "b": 2.0}
    ).fit(X, np.array(["a", "b"] * 8))  # fmt: skip
    model.save(path)
    return path, X, model.predict_proba(X)


def test_estimator(estimator, tmp_path):
    from primaldual.integrations.aeon import AttentionClassifier

    source, X, expected = estimator
    path, whole = tmp_path / "model", source.read_bytes()

    def read(content: bytes) -> str:
        path.write_bytes(content)
        np.testing.assert_array_equal(AttentionClassifier.load(path).predict_proba(X), expected)
        return "the same"

    go_through("estimator", [*of_header(whole), *mutants.of_bytes(whole, MUTANTS), whole], read, (ModelFileError,))


def test_estimator_whose_checksum_is_right(estimator, tmp_path):
    from primaldual.integrations.aeon import AttentionClassifier

    source, X, _ = estimator
    held_tensors, about = tensors.read(source)

    def read(mutant: Any) -> str:
        tensors.write(tmp_path / "model", held_tensors, mutant)
        model = AttentionClassifier.load(tmp_path / "model")
        model.device = "cpu"
        found = model.predict_proba(X)
        assert found.shape == (len(X), 2) and model.predict(X).shape == (len(X),)
        return "loaded"

    go_through("estimator, JSON", dicts(about), read, (ModelFileError,))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """A folder with a checkpoint of a run in its middle, and what its history would be."""
    folder = tmp_path_factory.mktemp("stopped")
    expected = train(toy(), "bn", RECIPE, (0, 1))

    def stop(progress: Any) -> None:
        if progress.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(toy(), "bn", RECIPE, (0, 1), folder=folder, every=0.0, watch=[stop])
    return folder, {record.seed: record.history for record in expected}


RECIPE = small(dropout=0.3, epochs=3, validation=0.2)


def resumed(folder: Path, tmp_path: Path, change: Callable[[Path], None]) -> dict[int, Any]:
    """The histories at the end, from a changed checkpoint."""
    shutil.rmtree(tmp_path / "runs", ignore_errors=True)
    shutil.copytree(folder, tmp_path / "runs")
    (path,) = (tmp_path / "runs" / "checkpoints").glob("*.safetensors")
    change(path)
    records = train(toy(), "bn", RECIPE, (0, 1), folder=tmp_path / "runs")
    return {record.seed: record.history for record in records}


def test_checkpoint(stopped, tmp_path):
    folder, expected = stopped
    (source,) = (folder / "checkpoints").glob("*.safetensors")
    whole = source.read_bytes()

    def read(content: bytes) -> str:
        assert resumed(folder, tmp_path, lambda path: path.write_bytes(content) and None) == expected
        (tmp_path / "one").write_bytes(content)
        tensors.read(tmp_path / "one")
        return "went on"

    go_through("checkpoint", [*of_header(whole), *mutants.of_bytes(whole, MUTANTS), whole], read, (DamagedFileError,))


def test_checkpoint_whose_checksum_is_right(stopped, tmp_path):
    folder, expected = stopped
    (source,) = (folder / "checkpoints").glob("*.safetensors")
    held_tensors, about = tensors.read(source)

    def read(mutant: Any) -> str:
        found = resumed(folder, tmp_path, lambda path: tensors.write(path, held_tensors, mutant))
        return "the same" if found == expected else "went on from there"

    go_through("checkpoint, JSON", dicts(about), read, ())


def test_record(trained, tmp_path):
    (source,) = trained.glob("*.json")
    path, whole = tmp_path / source.name, source.read_bytes()
    expected = Store(trained).records()

    def read(content: bytes) -> str:
        path.write_bytes(content)
        assert Store(tmp_path).records() == expected
        return "the same"

    go_through("record", [*mutants.of_bytes(whole, MUTANTS), whole], read, (RecordError,))


def test_record_whose_checksum_is_right(tmp_path):
    recipe, run = {"epochs": 2, "validation": 0.2}, toy(40)
    from primaldual.paper import jobs

    (job,) = jobs("table-uea", ["JapaneseVowels"], ["softmax"], (0,), **recipe)
    (record,) = train(replace(run, name="JapaneseVowels"), job.primal, job.recipe.having(d_model=16), (0,))
    said = record.to_dict()
    said["recipe"] = job.recipe.to_dict()

    def read(mutant: Any) -> str:
        records = [Record.from_dict(json.loads(mutants.as_file(mutant)))]
        found = compare("table-uea", records, ["JapaneseVowels"], ["softmax"], (0,), **recipe)
        assert found.markdown() and found.csv() and found.latex()
        return "in the table" if any(cell.last for cell in found.cells.values()) else "of another run"

    go_through("record, JSON", dicts(said), read, (RecordError, ValueError))


def test_spec():
    stated = [mechanism(name) for name in ("bn+sh", "sparse-bn+sh", "linear", "conv1d", "qk-norm")]
    stated.append(Primal(Laplace((0.5,) * 8), inputs=(DepthwiseConv1d(3, channels="each"), Rotary(), Scale(2.0))))
    q = torch.randn(1, 8, 12, 8)

    def read(mutant: Any) -> str:
        primal = Primal.from_dict(mutant)
        for form in ("text", "latex", "markdown"):
            assert len(derive(primal).explain(form)) < 1 << 20
        try:
            attention(q, q, q, primal)
        except (ValueError, TypeError) as error:
            assert str(error)
            return "not for these tensors"
        return "computed"

    inputs = [one for i, primal in enumerate(stated) for one in mutants.of_json(primal.to_dict(), MUTANTS // 6 + 1, i)]
    go_through("spec", inputs, read, (ValueError,))
