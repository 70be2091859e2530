"""Methods side by side: which series they get, what is recorded, and what the numbers say."""

import json
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import wilcoxon

from bench.series_files import write_set
from primaldual.base.leases import holding
from primaldual.bench.series import Folds, Limits, Resamples, Store, jobs, method, run, sets_in
from primaldual.bench.series.eta import Pace
from primaldual.bench.series.methods import METHODS, OURS
from primaldual.bench.series.prepared import Preparation
from primaldual.bench.series.protocol import limited
from primaldual.bench.series.results import Cell, Results, results, summary
from primaldual.bench.series.run import open_jobs
from primaldual.bench.series.scores import log_loss, of_labels
from primaldual.bench.series.sets import Part, read_set
from primaldual.data import DataError, DataNotFoundError

RIVALS = "bench.series_rivals."


@pytest.fixture
def folder(tmp_path):
    write_set(tmp_path / "sets", "Mine")
    return tmp_path / "sets"


def rows(part: Part) -> set[bytes]:
    return {x.tobytes() for x in part.x}


def test_resample_0_is_the_archives_split_and_others_have_its_sizes_and_classes(folder):
    data = read_set(sets_in(folder)[0], False)
    protocol = Resamples(3)
    train, test = protocol.split(data, 0)
    assert rows(train) == rows(data.train) and rows(test) == rows(data.test)
    seen = [rows(train)]
    for index in (1, 2):
        train, test = protocol.split(data, index)
        assert not rows(train) & rows(test) and rows(train) | rows(test) == rows(data.train + data.test)
        assert sorted(train.y) == sorted(data.train.y)
        assert rows(train) not in seen
        seen.append(rows(train))
    assert rows(protocol.split(data, 1)[0]) == seen[1]


def test_folds_cover_the_training_file_once_and_the_test_file_is_never_opened(folder):
    (folder / "Mine_TEST.ts").write_text("not a test file")
    data = read_set(sets_in(folder)[0], True)
    held_out = []
    for index in range(4):
        train, test = Folds(4).split(data, index)
        assert not rows(train) & rows(test) and len(train) + len(test) == 12
        assert sorted(test.y) == ["a", "b", "c"]
        held_out += [x.tobytes() for x in test.x]
    assert sorted(held_out) == sorted(x.tobytes() for x in data.train.x)
    with pytest.raises(DataError, match="expected a tag"):
        read_set(sets_in(folder)[0], False)
    (folder / "Mine_TEST.ts").unlink()
    assert read_set(sets_in(folder)[0], True).stated == data.stated
    with pytest.raises(DataNotFoundError, match="--train-only needs the training file alone"):
        read_set(sets_in(folder)[0], False)


@pytest.mark.parametrize("regression", [False, True], ids=["classification", "regression"])
def test_blocks_are_of_neighbours_in_the_file(tmp_path, regression):
    write_set(tmp_path, "Mine", regression=regression)
    data = read_set(sets_in(tmp_path)[0], True)
    place = {x.tobytes(): i for i, x in enumerate(data.train.x)}
    for fold in range(4):
        _, test = Folds(4, blocks=True).split(data, fold)  # classes take turns in the file: a block has one of each
        assert sorted(place[x.tobytes()] for x in test.x) == [3 * fold, 3 * fold + 1, 3 * fold + 2]


def test_folds_that_there_are_not_are_an_error(folder):
    data = read_set(sets_in(folder)[0], True)
    with pytest.raises(DataError, match="no class has 5 training series"):
        Folds(5).split(data, 0)
    with pytest.raises(DataError, match="12 training series do not make 13 folds"):
        Folds(13).split(data, 0)


def test_a_limit_keeps_every_class_and_proportions():
    y = np.array(["many"] * 80 + ["few"] * 18 + ["one"] * 2)
    part = Part([np.full((1, 2), float(i)) for i in range(100)], y)
    kept = limited(part, 20)
    counts = dict(zip(*np.unique(kept.y, return_counts=True), strict=True))
    assert sum(counts.values()) == 20 and counts["one"] == 1 and counts["few"] in (3, 4)
    assert rows(limited(part, 20)) == rows(kept) < rows(part)
    assert limited(part, 100) is part
    numbers = Part(part.x, np.arange(100.0))
    assert len(limited(numbers, 20)) == 20


def test_a_set_is_found_wherever_it_lies_and_a_wrong_name_is_told(folder):
    write_set(folder / "Other", "Other")
    write_set(folder / "deep" / "Deepest", "Deepest")
    assert [source.name for source in sets_in(folder)] == ["Deepest", "Mine", "Other"]
    assert [source.name for source in sets_in(folder, ["Other", "Mine"])] == ["Other", "Mine"]
    with pytest.raises(DataNotFoundError, match="did you mean 'Other'"):
        sets_in(folder, ["Othr"])


def test_series_are_prepared_as_far_as_a_method_needs_it():
    long, short = np.array([[1.0, np.nan, 3.0, 4.0], [0, 0, 0, 8]]), np.array([[2.0, 2.0], [np.nan, np.nan]])
    everything = Preparation(RIVALS + "TakesAll")
    given = everything.fit([long, short])
    assert given[0] is long and given[1] is short and not everything.notes

    tagged = Preparation(RIVALS + "Tagged")
    given = tagged.fit([long, short])
    assert given.shape == (2, 2, 4)
    assert given[0, 0].tolist() == [1, 2, 3, 4]
    # the means of the channels over known values: 12 / 5 and 8 / 4
    assert given[1].tolist() == [[2, 2, 2.4, 2.4], [2, 2, 2, 2]]
    assert tagged.notes == ["missing values interpolated", "padded or cut to the longest training series"]
    assert tagged.apply([np.arange(12.0).reshape(2, 6)])[0].tolist() == [[0, 1, 2, 3], [6, 7, 8, 9]]

    filled = Preparation(RIVALS + "TakesUnequal")
    given = filled.fit([long, short])
    assert [x.shape for x in given] == [(2, 4), (2, 2)] and all(x.flags.c_contiguous for x in given)
    assert given[1].tolist() == [[2, 2], [2, 2]] and filled.notes == ["missing values interpolated"]

    flat = Preparation(RIVALS + "Nearest")
    given = flat.fit([long, short])
    assert given.shape == (2, 8)
    assert np.allclose(given.mean(0), 0) and np.allclose(given.std(0), [1, 0, 1, 1, 1, 1, 1, 1])
    assert np.array_equal(flat.apply([long]), given[:1])


def test_scores_are_scikit_learns():
    from sklearn import metrics

    generator = np.random.default_rng(0)
    true, found = (generator.choice(["a", "b", "c", "d"], 50) for _ in range(2))
    scores = of_labels(true, found)
    assert scores["accuracy"] == pytest.approx(100 * metrics.accuracy_score(true, found))
    assert scores["macro_f1"] == pytest.approx(100 * metrics.f1_score(true, found, average="macro"))
    probabilities = generator.dirichlet(np.ones(4), 50).clip(0.01)
    probabilities /= probabilities.sum(1, keepdims=True)
    assert log_loss(true, probabilities, list("abcd")) == pytest.approx(metrics.log_loss(true, probabilities))
    assert log_loss(np.array(["a", "x"]), np.array([[1.0, 0.0], [0.5, 0.5]]), ["a", "b"]) == pytest.approx(
        -np.log(1e-3) / 2
    )
    assert log_loss(true, np.eye(4)[[0] * 50], list("abcd")) is None


def test_a_record_is_named_by_all_that_a_result_follows_from(folder, tmp_path):
    data = read_set(sets_in(folder)[0], False).stated

    def key(stated=data, name=RIVALS + "Guess", protocol=Resamples(1), split=0, seed=0, **changes):
        named = [job for job in jobs([stated], [method(name)], protocol, seed + 1) if job.split == split]
        return replace(named[-1], **changes).key

    same = key()
    assert key(protocol=Resamples(5)) == same  # more resamples leave the archive's split as it is
    others = {
        key(seed=1), key(protocol=Resamples(5), split=1), key(protocol=Resamples(1, limit=5)), key(protocol=Folds(4)),
        key(protocol=Folds(3)), key(protocol=Folds(3, blocks=True)), key(name=RIVALS + "Nearest"),
        key(parameters={"share": "1"}), key(stated=replace(data, digest="other")),
    }  # fmt: skip
    assert len(others) == 9 and same not in others
    (folder / "Mine_TEST.ts").write_text((folder / "Mine_TEST.ts").read_text().replace("0.1", "0.2"))
    assert key(stated=read_set(sets_in(folder)[0], False).stated) != same


def test_a_method_without_a_random_state_is_run_once_and_one_of_another_kind_not_at_all(folder):
    data = [read_set(sets_in(folder)[0], True).stated]
    chosen = [method(RIVALS + name) for name in ("Nearest", "Guess", "Mean")]
    found = [(job.method, job.split, job.seed) for job in jobs(data, chosen, Folds(2), 3)]
    assert [one for one in found if one[0] == "Nearest"] == [("Nearest", 0, 0), ("Nearest", 1, 0)]
    assert len([one for one in found if one[0] == "Guess"]) == 6 and not [one for one in found if one[0] == "Mean"]


@pytest.mark.parametrize(
    ("name", "said"),
    [("minrocket", "did you mean 'minirocket'"), ("sklearn.svm.NoSVC", "there is no class sklearn.svm.NoSVC"),
     ("nowhere.Forest", "there is no class nowhere.Forest"), ("json.JSONDecoder", "neither a classifier nor"),
     ("json.dumps", "is not a class")],
)  # fmt: skip
def test_a_method_that_there_is_not_is_told(name, said):
    with pytest.raises(ValueError, match=said):
        method(name)


@pytest.mark.parametrize("damage", ["", "[]", "{}", "cut", "changed", "moved"])
def test_a_damaged_record_counts_as_none(folder, tmp_path, caplog, damage):
    first, second = jobs([read_set(sets_in(folder)[0], False).stated], [method(RIVALS + "Guess")], Resamples(), 2)
    store = Store(tmp_path)
    store.add(first, {"scores": {"accuracy": 50.0}}, {})
    assert store.record(first)["scores"] == {"accuracy": 50.0} and store.record(second) is None
    text = store.path(first).read_text()
    changed = {"cut": text[:-40], "changed": text.replace("50.0", "90.0"), "moved": text}.get(damage, damage)
    target = second if damage == "moved" else first
    store.path(target).write_text(changed)
    assert store.record(target) is None and "is damaged, and is measured anew" in caplog.text


def test_a_failure_is_final_until_there_is_more_time_or_it_is_tried_again(folder, tmp_path):
    late, broken = jobs([read_set(sets_in(folder)[0], False).stated], [method(RIVALS + "Guess")], Resamples(), 2)
    store = Store(tmp_path)
    store.add(late, {"failure": "stopped after 5 s", "time_limit": 5.0}, {})
    store.add(broken, {"failure": "LookupError"}, {})
    for limits, left in (
        (Limits(seconds=5), []), (Limits(seconds=4), []), (Limits(seconds=6), [late]), (Limits(), [late]),
        (Limits(seconds=5, retry=True), [late, broken]),
    ):  # fmt: skip
        assert open_jobs([late, broken], store, limits) == left


def test_what_another_process_has_in_hand_is_waited_for_and_not_done_twice(folder, tmp_path):
    (source,) = sets_in(folder)
    (job,) = jobs([read_set(source, False).stated], [method(RIVALS + "Slow")], Resamples(), 1)
    store, heard, held = Store(tmp_path), [], threading.Event()

    def other() -> None:
        with holding([store.lock(job)]):
            held.set()
            time.sleep(0.3)
            store.add(job, {"scores": {"accuracy": 12.5}}, {})

    thread = threading.Thread(target=other)
    thread.start()
    held.wait()
    run([job], [source], store, Limits(), {}, lambda job, record: heard.append(record["scores"]["accuracy"]))
    thread.join()
    assert heard == [12.5]


def fake(scores: dict[str, list[list[float]]], kind="classification") -> Results:
    """From the scores of every fit by method, a list for every set."""
    measure = "accuracy" if kind == "classification" else "rmse"
    count = len(next(iter(scores.values())))
    cells = {
        (f"S{i}", name): Cell(len(values[i]), [{"scores": {measure: value}, "notes": []} for value in values[i]])
        for name, values in scores.items()
        for i in range(count)
    }
    return Results(kind, tuple(f"S{i}" for i in range(count)), tuple(scores), cells)


def test_ranks_are_of_means_over_fits_and_ties_share_them():
    found = fake({"a": [[90, 94], [50]], "b": [[92], [60]], "c": [[10, 20], [60]]})
    assert found.ranks() == {"a": (1.5 + 3) / 2, "b": (1.5 + 1.5) / 2, "c": (3 + 1.5) / 2}
    lower = fake({"a": [[1.0]], "b": [[2.0]]}, "regression")
    assert lower.ranks() == {"a": 1.0, "b": 2.0}


def test_means_leave_out_a_set_that_a_method_failed_on():
    found = fake({"a": [[90], [50]], "b": [[92], []]})
    assert found.complete == ("S0",)
    lines = {line["method"]: line for line in summary(found)}
    assert lines["a"]["accuracy"] == 90 and lines["a"]["sets"] == 2 and lines["b"]["sets"] == 1
    assert lines["a"]["rank"] == 2.0
    never = fake({"a": [[90], [50]], "b": [[92], [60]], "c": [[], []]})
    assert never.complete == ("S0", "S1") and never.ranks() == {"a": 2.0, "b": 1.0}
    assert summary(never)[2] == dict.fromkeys(summary(never)[0]) | {"method": "c", "sets": 0}


def test_pairs_say_who_wins_and_whether_it_is_chance():
    generator = np.random.default_rng(0)
    first, second = generator.uniform(50, 100, (2, 8))
    second[0] = first[0]
    (pair,) = fake({"a": [[x] for x in first], "b": [[x] for x in second]}).pairs()
    assert tuple(pair.outcome) == ((first > second).sum(), 1, (first < second).sum())
    assert pair.gain == pytest.approx((first - second).mean())
    assert pair.p == pytest.approx(wilcoxon(first - second).pvalue)
    (errors,) = fake({"a": [[1e-6], [3.0]], "b": [[2e-6], [1.0]]}, "regression").pairs()
    assert tuple(errors.outcome) == (1, 0, 1) and errors.gain is None and errors.p is None


def test_results_have_ours_first_and_count_what_is_missing():
    wanted = [
        SimpleNamespace(kind="classification", dataset="S", method=name, split=0, seed=seed)
        for name in ("rf", OURS)
        for seed in (0, 1)
    ]
    said = [{"scores": {"accuracy": 1.0}}, {"failure": "no"}, None, {"scores": {"accuracy": 2.0}}]
    records = dict(zip(map(id, wanted), said, strict=True))
    lookup = SimpleNamespace(__getitem__=None)
    lookup = type("ById", (), {"__getitem__": lambda self, job: records[id(job)]})()
    (found,) = results(wanted, lookup, ["rf", OURS])
    assert found.methods == (OURS, "rf")
    rf, ours = found.cells["S", "rf"], found.cells["S", OURS]
    assert rf.failures == ["split 0, seed 1: no"] and rf.mean("accuracy") == 1.0
    assert (ours.expected, len(ours.records), ours.failures) == (2, 1, [])


def test_the_time_that_is_left_follows_the_method_and_the_size_of_the_set():
    def job(dataset, name, size):
        return SimpleNamespace(dataset=dataset, method=name, size=size)

    pace = Pace()
    assert pace.seconds([job("small", "rf", 10)]) is None
    pace.add(job("small", "rf", 10), {"fit_seconds": 1.5, "predict_seconds": 0.5})
    pace.add(job("small", "dtw", 10), {"failure": "stopped", "time_limit": 8.0})
    assert pace.seconds([job("small", "rf", 10), job("large", "rf", 100)]) == pytest.approx(2 + 20)
    assert pace.seconds([job("small", "dtw", 10)], processes=2) == pytest.approx(4)
    assert pace.seconds([job("small", "new", 10)]) == pytest.approx(5)


def test_diagrams_are_drawn_where_there_is_enough_to_draw():
    pytest.importorskip("seaborn")
    from matplotlib import pyplot

    from primaldual.bench.series.plots import critical_difference, scatter

    generator = np.random.default_rng(0)
    for kind in ("classification", "regression"):
        found = fake({name: [[x] for x in generator.uniform(5, 99, 7)] for name in ("a", "b", "c")}, kind)
        assert critical_difference(found).startswith(b"\x89PNG") and scatter(found, "c").startswith(b"\x89PNG")
    assert not pyplot.get_fignums()
    never = fake({name: [[float(ord(name) + i)] * (name != "d") for i in range(7)] for name in ("a", "b", "c", "d")})
    assert critical_difference(never) and scatter(never, "b") and scatter(never, "d") is None
    few = fake({"a": [[1.0]], "b": [[2.0]]})
    assert critical_difference(few) is None and scatter(few, "b") is None


@pytest.mark.deep
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("regression", [False, True], ids=["classification", "regression"])
def test_every_method_of_the_list_fits_a_set_of_either_kind(tmp_path, name, regression):
    write_set(tmp_path, "Tiny", cases=20, steps=24, regression=regression, unequal=True, missing=True)
    (source,) = sets_in(tmp_path)
    wanted = list(jobs([read_set(source, False).stated], [method(name)], Resamples(), 1))
    records = []
    run(wanted, [source], Store(tmp_path / "out"), Limits(), {}, lambda job, record: records.append(record))
    (record,) = records
    assert "failure" not in record, record["failure"]
    assert json.loads(Store(tmp_path / "out").path(wanted[0]).read_text())["scores"] == record["scores"]
