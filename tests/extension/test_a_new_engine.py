"""An engine of one's own for the paper's tables: jobs become files in a folder, and workers of any kind do them."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from primaldual.cli import app
from primaldual.data import DataError, load
from primaldual.paper import ENGINES, Failure, Job, Place, compare, jobs, local
from primaldual.primal import Primal
from primaldual.training import Recipe, Store, train


def by_seed(wanted: Sequence[Job], place: Place) -> list[Failure]:
    """A file per seed; what has to be done is in it whole."""
    queue = place.folder / "queue"
    queue.mkdir(parents=True, exist_ok=True)
    for job in wanted:
        for seed in job.seeds:
            what = {"set": job.dataset, "primal": job.primal.to_dict(), "recipe": job.recipe.to_dict(), "seed": seed}
            (queue / f"{len(list(queue.iterdir()))}.json").write_text(json.dumps(what))
    failures = [work(path, place) for path in sorted(queue.iterdir())]
    return [failure for failure in failures if failure]


def work(path: Path, place: Place) -> Failure | None:
    """What a worker does, on whatever machine."""
    job = json.loads(path.read_text())
    path.unlink()
    try:
        data = load(job["set"], place.data_dir, offline=place.offline)
    except DataError as error:
        return Failure(job["set"], None, str(error))
    primal, recipe = Primal.from_dict(job["primal"]), Recipe.from_dict(job["recipe"])
    train(data, primal, recipe, [job["seed"]], folder=place.folder, device=place.device)
    return None


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIMALDUAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PRIMALDUAL_DATA", raising=False)


def test_its_records_make_the_table_that_the_local_engine_s_make(tmp_path):
    part = {"only": ["BasicMotions"], "mechanisms": ["softmax"], "seeds": range(2), "epochs": 1, "d_model": 16}
    part["dropout"] = 0.0  # its masks are those of an ensemble
    wanted = jobs("table-uea-more", **part)
    texts = []
    for name, engine in (("mine", by_seed), ("local", local)):
        assert engine(wanted, Place(tmp_path / name)) == []
        texts.append(compare("table-uea-more", Store(tmp_path / name).records(), **part).markdown())
    assert texts[0] == texts[1]
    assert all(record.members == [record.seed] for record in Store(tmp_path / "mine").records())


def test_it_is_named_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setitem(ENGINES, "by-seed", by_seed)
    command = ["reproduce", "table-uea", "--only", "PEMS-SF", "--mechanisms", "softmax", "--seeds", "1", "--offline"]
    result = CliRunner().invoke(app, [*command, "--engine", "by-seed", "--output", str(tmp_path)])
    assert result.exit_code == 1 and "missing set PEMS-SF" in result.stdout
    result = CliRunner().invoke(app, [*command, "--engine", "cluster", "--output", str(tmp_path)])
    assert result.exit_code == 2 and "--engine must be one of local, by-seed; got 'cluster'" in result.stderr
