"""Records of before are found again: their keys, and what is read of them."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from primaldual.models import LanguageSizes, SequenceSizes
from primaldual.paper.families import blank
from primaldual.primal import Primal
from primaldual.training import Recipe, Record, SequenceTask, SeriesTask, TextTask, key, series_recipe
from primaldual.training.recipe import canonical
from primaldual.training.series_recipe import nested, side_by_side

RUNS = Path(__file__).parents[2] / "results" / "h200" / "runs"
OTHERS = ('"name": "lra-', '"name": "text-')
OF_SERIES = sorted(
    path for path in RUNS.glob("*.json") if not any(other in path.read_text("utf-8") for other in OTHERS)
)  # fmt: skip
SOME = OF_SERIES[::120]


def read(path: Path) -> tuple[dict, Record]:
    written = json.loads(path.read_text("utf-8"))
    return written, Record.from_dict(written)


def recomputed(record: Record) -> str:
    """Without series or documents: their hash is in the record."""
    recipe, primal = Recipe.from_dict(record.recipe), Primal.from_dict(record.mechanism)
    if isinstance(recipe.model, SequenceSizes):
        task = object.__new__(SequenceTask)
        task.mechanism, task.dataset = primal, SimpleNamespace(hash=record.data["hash"])
        task.config = SimpleNamespace(impl="auto")
        return key(task, recipe, record.seed)
    if isinstance(recipe.model, LanguageSizes):
        task = object.__new__(TextTask)
        task.mechanism, task.dataset = primal, SimpleNamespace(hash=record.data["hash"])
        task.config = SimpleNamespace(impl="auto")
        return key(task, recipe, record.seed)
    data = blank(record.data["name"])
    vars(data)["hash"] = record.data["hash"]
    return key(SeriesTask.of(data, primal, recipe), recipe, record.seed)


@pytest.mark.parametrize("path", SOME, ids=lambda path: path.stem)
def test_the_key_of_a_committed_record_is_its_file_s_name(path):
    written, record = read(path)
    assert recomputed(record) == path.stem == record.key
    assert side_by_side(Recipe.from_dict(nested(written["recipe"]))) == written["recipe"]


@pytest.mark.deep
def test_the_key_of_every_committed_record_is_its_file_s_name():
    assert len(OF_SERIES) == 910
    assert all(recomputed(read(path)[1]) == path.stem for path in RUNS.glob("*.json"))


@pytest.mark.parametrize("path", SOME, ids=lambda path: path.stem)
def test_a_record_of_before_says_what_it_said(path):
    written, record = read(path)
    for name in ("best", "last", "selected"):
        score, said = getattr(record, name), written[name]
        assert (score and tuple(score)) == (said and tuple(said.values()))
    assert record.more_is_better == (written["metric"] == "accuracy") and record.steps is None
    assert record.recipe["model"]["d_model"] == written["recipe"]["d_model"]
    assert Record.from_dict(json.loads(json.dumps(record.to_dict()))) == record


def test_what_a_recipe_was_given_since_is_in_the_key_where_it_is_used():
    plain = series_recipe(epochs=5)
    assert "schedule" not in canonical(plain) and "accumulate" not in canonical(plain)
    assert canonical(plain.having(accumulate=2))["accumulate"] == 2
    assert canonical(plain.having(epochs=None, steps=7))["steps"] == 7
