"""Runs are recorded once, and a kill changes nothing."""

import errno
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from primaldual import mechanism
from primaldual.base.files import remove
from primaldual.base.leases import BusyError, holding
from primaldual.base.tensors import read, write
from primaldual.models import PatternSizes, build
from primaldual.training import (
    Cosine,
    OneCycle,
    PatternTask,
    Recipe,
    Record,
    RecordError,
    SeriesTask,
    Store,
    key,
    train,
)
from primaldual.training.ensemble import Ensemble
from primaldual.training.model_file import ModelFileError
from primaldual.training.predictor import Predictor
from training.tasks import Sums, Words, quick
from training.toy import small, toy

TESTS = Path(__file__).parents[1]


def same(record: Record) -> dict:
    """What must not depend on when and where a run ran."""
    return {k: v for k, v in record.to_dict().items() if k not in ("seconds", "peak_bytes", "environment", "speed")}


@pytest.fixture
def steps(monkeypatch) -> list[int]:
    """Counts the training steps."""
    done: list[int] = []
    step = Ensemble.step
    monkeypatch.setattr(Ensemble, "step", lambda self, *given: (done.append(1), step(self, *given))[1])
    return done


def child(folder: Path, **settings) -> subprocess.Popen:
    command = [sys.executable, str(TESTS / "training" / "child.py"), str(folder), json.dumps(settings)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS.parent / "src")))}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def kill_after(process: subprocess.Popen, count: int) -> None:
    assert process.stdout is not None
    for _ in range(count):
        assert process.stdout.readline() == "step\n"
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()


@pytest.mark.parametrize(("dropout", "every"), [(0.0, 0.25), (0.3, 0.0)], ids=["now and then", "dropout, every batch"])
def test_a_run_that_was_killed_ends_as_if_it_had_not_been(tmp_path, steps, dropout, every):
    settings = {"dropout": dropout, "epochs": 6, "validation": 0.2}  # 18 series: 3 steps an epoch
    data, recipe, seeds = toy(), small(**settings), (0, 3)
    expected = train(data, "bn+sh", recipe, seeds)
    del steps[:]
    kill_after(child(tmp_path, pause=0.1, every=every, seeds=seeds, **settings), 8)  # in the middle of the third epoch
    assert not list(tmp_path.glob("*.json")) and len(list((tmp_path / "checkpoints").iterdir())) >= 1
    resumed = train(data, "bn+sh", recipe, seeds, folder=tmp_path)
    assert [same(record) for record in resumed] == [same(record) for record in expected]
    lost = len(steps) - (18 - 8)
    assert 0 <= lost <= (1 if every == 0.0 else 4)
    assert not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_interrupted_run_goes_on_with_its_dropout(tmp_path, steps, monkeypatch, device):
    data, recipe = toy(), small(dropout=0.3, epochs=5)
    expected = train(data, "bn+sh", recipe, (0, 1), device=device)
    del steps[:]
    step = Ensemble.step

    def interrupted(self: Ensemble, *given) -> None:
        if len(steps) == 7:  # in the middle of the third epoch
            raise KeyboardInterrupt
        step(self, *given)

    monkeypatch.setattr(Ensemble, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(data, "bn+sh", recipe, (0, 1), folder=tmp_path, device=device, every=0.0)
    monkeypatch.setattr(Ensemble, "step", step)
    resumed = train(data, "bn+sh", recipe, (0, 1), folder=tmp_path, device=device)
    assert len(steps) == 5 * 3
    for one, other in zip(resumed, expected, strict=True):
        assert one.history["loss"] == pytest.approx(other.history["loss"], rel=0, abs=0 if device == "cpu" else 1e-9)


def test_a_run_of_another_task_that_was_killed_ends_as_if_it_had_not_been(tmp_path, steps):
    settings, seeds = {"steps": 11, "accumulate": 2, "evaluate_every": 4}, (0, 3)  # 4 batches an epoch
    expected = train(Words(), recipe=quick(**settings), seeds=seeds)
    del steps[:]
    kill_after(child(tmp_path, pause=0.1, every=0.0, seeds=seeds, words=True, **settings), 6)
    resumed = train(Words(), recipe=quick(**settings), seeds=seeds, folder=tmp_path)
    assert [same(record) for record in resumed] == [same(record) for record in expected]
    assert 0 <= len(steps) - (11 - 6) <= 1


EVERYTHING = {"accumulate": 2, "schedule": OneCycle(), "optimizer": "adamw", "weight_decay": 0.1}
INTERRUPTED = {
    "series": (lambda: SeriesTask(toy(), "bn+sh", small(dropout=0.3).model), small(dropout=0.3, validation=0.2), 6),
    "epochs": (lambda: Sums(p=0.3, validation=True), quick(epochs=2), 6),
    "steps": (lambda: Sums(p=0.3), quick(steps=8, evaluate_every=3, **EVERYTHING), 8),
    "several lengths": (Words, quick(steps=9, evaluate_every=2, **EVERYTHING), 9),
}


@pytest.mark.parametrize("name", INTERRUPTED)
def test_interrupted_between_any_two_batches_a_run_ends_bit_by_bit_as_it_would_have(tmp_path, steps, monkeypatch, name):
    make, recipe, count = INTERRUPTED[name]
    expected = train(make(), recipe=recipe, seeds=(0, 1), folder=tmp_path / "whole")
    step, models = Ensemble.step, (tmp_path / "whole" / "models").glob("*")
    weights = {path.name: path.read_bytes() for path in models}
    assert len(steps) == count and len(weights) == 2
    for at in range(count):
        del steps[:]

        def interrupted(self: Ensemble, *given, at=at) -> None:
            if len(steps) == at:
                raise KeyboardInterrupt
            step(self, *given)

        folder = tmp_path / str(at)
        monkeypatch.setattr(Ensemble, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(make(), recipe=recipe, seeds=(0, 1), folder=folder, every=0.0)
        monkeypatch.setattr(Ensemble, "step", step)
        resumed = train(make(), recipe=recipe, seeds=(0, 1), folder=folder)
        assert len(steps) == count and [same(record) for record in resumed] == [same(record) for record in expected]
        assert {path.name: path.read_bytes() for path in (folder / "models").glob("*")} == weights


def test_killed_between_two_records_a_run_is_neither_lost_nor_run_twice(tmp_path, steps):
    settings = {"dropout": 0.3, "epochs": 2}
    data, recipe, seeds = toy(), small(**settings), (0, 1)
    expected = train(data, "bn+sh", recipe, seeds)
    del steps[:]
    process = child(tmp_path, pause=0.0, every=0.0, seeds=seeds, die_after_record=True, **settings)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    (first,) = tmp_path.glob("*.json")
    written = first.stat().st_mtime_ns
    resumed = train(data, "bn+sh", recipe, (2, 1, 0), folder=tmp_path)
    assert [same(record) for record in resumed[:0:-1]] == [same(record) for record in expected]
    assert first.stat().st_mtime_ns == written
    assert len(steps) == 2 * 3  # those of seed 2 alone
    assert len(list(tmp_path.glob("*.json"))) == 3


def test_a_finished_run_is_never_run_again(tmp_path, steps):
    data, recipe = toy(), small()
    first = train(data, "bn", recipe, (0, 1), folder=tmp_path)
    assert len(steps) == 2 * 3
    assert train(data, "bn", recipe, (1, 0), folder=tmp_path, resume=False) == first[::-1]
    assert len(steps) == 2 * 3
    more = train(data, "bn", recipe, (0, 5), folder=tmp_path)
    assert more[0] == first[0] and more[1].members == [5]
    assert Store(tmp_path).records() == sorted([*first, more[1]], key=lambda record: record.key)


def test_two_that_run_the_same_in_one_folder_share_the_work(tmp_path, steps, caplog, monkeypatch):
    monkeypatch.setattr("primaldual.training.run.PAUSE", 0.02)
    folder, recipe = tmp_path / "runs", small(epochs=4)

    def run(seeds):
        return train(toy(), "bn", recipe, seeds, folder=folder)

    with caplog.at_level("WARNING"), ThreadPoolExecutor(3) as pool:
        first, second, more = pool.map(run, [(0, 1), (0, 1), (1, 2)])
    assert first == second and first[1] == more[0]
    assert len(steps) in (2 * 4 * 3, 3 * 4 * 3)  # seed 1 with 0, and 2 alone; or with 2, and 0 after it
    assert sorted(record.seed for record in Store(folder).records()) == [0, 1, 2]
    assert "trains the same; its records are waited for" in caplog.text
    assert not list((folder / "checkpoints").iterdir())


def test_what_another_process_trains_may_be_left_to_it(tmp_path):
    task = SeriesTask.of(toy(), "bn", small())
    with holding([Store(tmp_path).lease(key(task, small(), 3))]):
        with pytest.raises(BusyError):
            train(toy(), "bn", small(), (2, 3), folder=tmp_path, wait=False)
        assert len(train(toy(), "bn", small(), (2,), folder=tmp_path, wait=False)) == 1


def test_a_record_says_what_was_run_and_what_came_of_it(tmp_path):
    data, recipe = toy(), small(epochs=3)
    (record,) = train(data, "bn", recipe, (4,), folder=tmp_path)
    written = json.loads((tmp_path / f"{record.key}.json").read_text())
    assert Recipe.from_dict(written["recipe"]) == recipe and written["mechanism"] == mechanism("bn").to_dict()
    assert written["data"]["hash"] == data.hash and written["seed"] == 4 and written["members"] == [4]
    assert written["environment"]["torch"] == torch.__version__ and written["seconds"] > 0 and written["peak_bytes"] > 0
    assert 0 < written["speed"]["seconds_per_step"] < written["seconds"]
    tests = written["history"]["test"]
    assert written["history"]["epoch"] == [1, 2, 3] and written["metric"] == "accuracy"
    assert written["best"] == {"epoch": tests.index(max(tests)) + 1, "value": max(tests)}
    assert written["last"] == {"epoch": 3, "value": tests[-1]} and written["selected"] is None
    assert Record.from_dict(written) == record
    model = build(recipe.model.config(data, "bn"), 4)
    assert written["parameters"] == sum(p.numel() for p in model.parameters())


def test_a_folder_that_cannot_be_written_to_is_known_before_the_first_step(tmp_path, steps):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        train(toy(), "softmax", small(), folder=tmp_path / "file")
    assert not steps


def test_a_full_disk_names_the_file_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*\.safetensors'"):
        train(toy(), "softmax", small(), folder=tmp_path)
    assert not list((tmp_path / "checkpoints").iterdir())


def test_another_process_that_ends_the_same_run_does_no_harm(tmp_path, monkeypatch):
    write_bytes = Path.write_bytes

    def tidied_up_after(path: Path, content: bytes) -> None:
        write_bytes(path, content)
        if path.parent.name == "checkpoints":
            remove(path.with_name(path.name[1:].rpartition("-")[0]))

    monkeypatch.setattr(Path, "write_bytes", tidied_up_after)
    records = train(toy(), "softmax", small(), folder=tmp_path, every=0.0)
    assert Store(tmp_path).records() == records


@pytest.mark.parametrize("content", ["", '{"name": "a package"}', "[1]"], ids=["empty", "of others", "a list"])
def test_a_file_that_is_no_record_is_named(tmp_path, content):
    path = tmp_path / f"{'0' * 20}.json"
    path.write_text(content)
    with pytest.raises(RecordError, match=r"0\.json is damaged, or not the record of a run"):
        Store(tmp_path).records()


def test_files_of_others_in_the_folder_are_left_aside(tmp_path, caplog):
    records = train(toy(), "softmax", small(), folder=tmp_path)
    (tmp_path / "package.json").write_text('{"name": "a package"}')
    with caplog.at_level("WARNING"):
        assert Store(tmp_path).records() == records
    assert "package.json has not the name of a record" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r["history"]["test"].__setitem__(0, 99.0), lambda r: r.update(seed=1, members=[1]),
        lambda r: r.update(failure="it failed"), lambda r: r["history"]["loss"].append(0.1),
        lambda r: r["history"].pop("epoch"), lambda r: r.update(recipe={}), lambda r: r["data"].pop("name"),
        lambda r: r.update(best=[1, 2]), lambda r: r["recipe"].update(epochs=3), lambda r: r.update(more="of it"),
    ],
)  # fmt: skip
def test_a_record_that_was_changed_is_refused_with_or_without_its_checksum(tmp_path, change):
    (record,) = train(toy(), "bn", small(), folder=tmp_path)
    path = tmp_path / f"{record.key}.json"
    written = json.loads(path.read_text())
    change(written)
    path.write_text(json.dumps(written))
    with pytest.raises(RecordError, match="take it out of the folder"):
        Store(tmp_path).record(record.key)


def test_a_record_under_the_name_of_another_run_is_refused(tmp_path):
    (record,) = train(toy(), "bn", small(), folder=tmp_path)
    path = tmp_path / f"{record.key}.json"
    path.rename(tmp_path / f"{'0' * 20}.json")
    with pytest.raises(RecordError, match=f"it is that of {record.key}"):
        Store(tmp_path).records()


def test_a_record_from_before_there_were_checksums_is_read(tmp_path):
    (record,) = train(toy(), "bn", small(), folder=tmp_path)
    path = tmp_path / f"{record.key}.json"
    path.write_text(json.dumps({name: x for name, x in json.loads(path.read_text()).items() if name != "sha256"}))
    assert Store(tmp_path).record(record.key) == record


def test_the_model_of_a_run_predicts_what_its_record_says(tmp_path):
    data = toy()
    (record,) = train(data, "bn+sh", small(epochs=3), folder=tmp_path)
    model = Store(tmp_path).model(record.key)
    with torch.no_grad():
        hits = model(data.test.x.double(), data.test.padding).argmax(-1) == data.test.y
    assert 100 * hits.double().mean().item() == pytest.approx(record.last.value)


def test_regression_is_scored_by_its_root_mean_squared_error_lowest_first():
    (record,) = train(toy(regression=True), "softmax", small(epochs=5, validation=0.2, evaluate_every=2))
    tests, validations = record.history["test"], record.history["validation"]
    assert record.history["epoch"] == [1, 2, 4, 5] and record.metric == "rmse"
    assert record.best.value == min(tests) and record.last.value == tests[-1]
    assert record.selected.value == tests[validations.index(min(validations))]


def test_standardised_targets_are_scored_and_predicted_in_their_own_unit(tmp_path):
    raw = toy(regression=True)
    parts = {"train": raw.train, "test": raw.test}
    raw = replace(raw, **{name: replace(part, y=300 + 50 * part.y) for name, part in parts.items()})
    data = raw.standardised()
    assert data.train.y.mean().abs() < 1e-6 and data.standardised().target_std == pytest.approx(data.target_std)
    (record,) = train(data, "bn", small(epochs=3), folder=tmp_path)
    with torch.no_grad():
        away = Store(tmp_path).model(record.key)(raw.test.x.double(), raw.test.padding) - raw.test.y
    assert away.square().mean().sqrt().item() == pytest.approx(record.last.value, rel=1e-6)
    assert record.last.value < 100 < train(raw, "bn", small(epochs=3))[0].last.value
    assert len({raw.hash, data.hash, replace(data, target_std=1.0).hash}) == 3


def test_a_run_that_fails_has_no_last_and_no_model(tmp_path):
    (record,) = train(toy(), "softmax", small(learning_rate=1e200, epochs=4), folder=tmp_path)
    assert "not finite" in record.failure and record.last is None
    assert not (tmp_path / "models").exists()
    assert train(toy(), "softmax", small(learning_rate=1e200, epochs=4), folder=tmp_path) == [record]


def test_without_test_series_there_is_no_score():
    (record,) = train(toy(test=0), "softmax", small())
    assert record.best is record.last is record.selected is record.validation is None
    assert len(record.history["loss"]) == 2


def test_without_test_series_a_validation_share_has_a_score():
    (record,) = train(toy(test=0), "softmax", small(validation=0.2))
    assert record.selected is None and record.validation.value == max(record.history["validation"])


def test_the_key_is_of_everything_that_the_result_follows_from(monkeypatch):
    data, recipe, primal = toy(), small(), mechanism("bn", beta=0.5)

    def name(data=data, primal=primal, recipe=recipe, seeds=(0,), **settings):
        return key(SeriesTask(data, primal, recipe.model, **settings), recipe, *seeds)

    others = [
        name(seeds=(1,)), name(seeds=()), name(primal=mechanism("bn", beta=0.6)), name(data=toy(seed=1)),
        name(recipe=replace(recipe, clip=3.0)), name(recipe=recipe.having(d_model=8)), name(impl="sdpa"),
        name(recipe=replace(recipe, schedule=Cosine())), name(recipe=replace(recipe, accumulate=2)),
    ]  # fmt: skip
    assert len({name(), *others}) == 1 + len(others)
    assert name(primal=mechanism("bn", beta=1)) == name(primal=mechanism("bn", beta=1.0))
    before = name()
    monkeypatch.setattr("primaldual.training.record.VERSION", 0)
    assert name() != before


def test_a_damaged_checkpoint_is_said_and_started_over(tmp_path, caplog):
    data, recipe = toy(), small(epochs=2)
    kill_after(child(tmp_path, pause=0.02, every=0.0, seeds=[0], dropout=0.0, epochs=2), 4)
    (path,) = (tmp_path / "checkpoints").glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-100])
    with caplog.at_level("WARNING"):
        (record,) = train(data, "bn+sh", recipe, folder=tmp_path)
    assert "damaged" in caplog.text and same(record) == same(train(data, "bn+sh", recipe)[0])


def test_a_checkpoint_of_which_one_bit_has_changed_is_said_and_started_over(tmp_path, monkeypatch, caplog):
    (expected,) = train(toy(), "bn", small(dropout=0.3))
    monkeypatch.setattr("primaldual.training.run.files.remove", lambda path: None)
    train(toy(), "bn", small(dropout=0.3), folder=tmp_path)
    monkeypatch.undo()
    (path,) = (tmp_path / "checkpoints").iterdir()
    whole = path.read_bytes()
    places = [whole.index(word) for word in (b"seconds", b"random", b"loss")]
    for at in (*places, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        for record in tmp_path.glob("*.json"):
            record.unlink()
        caplog.clear()
        with caplog.at_level("WARNING"):
            (found,) = train(toy(), "bn", small(dropout=0.3), folder=tmp_path)
        assert same(found) == same(expected) and "its members start anew" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": 7}, {"batch": -1}, {"step": 1}, {"seen": "many"}, {"history": []}, {"active": [1]}, {"seconds": -1.0},
        {"history": [{"epoch": [1, 1], "loss": [0.1, 0.1], "test": [50.0, 50.0]}]}, {"failures": None}, {"epoch": None},
        {"history": [{"epoch": [1], "loss": [0.1], "test": [None]}]}, {"evaluated": 2**70}, {"seeds": [0, 0]},
        {"seen": 10**400}, {"paces": [None]}, {"seconds": 10**400},
        {"history": [{"epoch": [1], "loss": [10**400], "test": [50.0]}]},
    ],
    ids=str,
)  # fmt: skip
def test_a_checkpoint_that_is_none_of_this_training_is_started_over(tmp_path, monkeypatch, change):
    (expected,) = train(toy(), "bn", small(dropout=0.3))

    def stop(self, *given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Ensemble, "evaluate", stop)
        train(toy(), "bn", small(dropout=0.3), folder=tmp_path, every=0.0)
    (path,) = (tmp_path / "checkpoints").iterdir()
    tensors, about = read(path)
    write(path, tensors, about | change)
    (found,) = train(toy(), "bn", small(dropout=0.3), folder=tmp_path)
    assert same(found) == same(expected)


def test_a_model_from_before_there_were_checksums_is_read(tmp_path):
    (record,) = train(toy(), "bn", small(), folder=tmp_path)
    model = Store(tmp_path).model(record.key)
    path = tmp_path / "models" / f"{record.key}.safetensors"
    about = json.dumps({"config": model.config.to_dict()})
    path.write_bytes(save(model.state_dict(), metadata={"primaldual": about}))
    found = Store(tmp_path).model(record.key)
    assert found.config == model.config
    assert all(torch.equal(x, found.state_dict()[name]) for name, x in model.state_dict().items())
    with pytest.raises(ModelFileError, match="but not how series are prepared for it"):
        Predictor.load(path)


@pytest.mark.parametrize("regression", [False, True])
def test_a_pattern_transformer_is_kept_with_what_its_user_needs(tmp_path, regression):
    data = toy(regression=regression).standardised()
    sizes = PatternSizes(widths=(3,), d_model=8, heads=2, layers=1, feedforward=8, blocks=1, tokens=6)
    recipe = Recipe(sizes, steps=3, batch_size=8, dtype="float64")
    (record,) = train(PatternTask(data, "bn", sizes), recipe=recipe, folder=tmp_path)
    found = Predictor.load(tmp_path / "models" / f"{record.key}.safetensors")
    series = [x[:n].numpy() for x, n in zip(data.test.x, data.test.lengths, strict=True)]
    if regression:
        away = found.numbers(series) - (data.test.y.double() * data.target_std + data.target_mean).numpy()
        assert (away**2).mean() ** 0.5 == pytest.approx(record.last.value)
    else:
        hits = found.probabilities(series).argmax(1) == data.test.y.numpy()
        assert 100 * hits.mean() == pytest.approx(record.last.value)


def test_settings_that_are_not_those_of_the_weights_are_refused_before_memory_is_taken(tmp_path):
    (record,) = train(toy(), "bn", small(), folder=tmp_path)
    path = tmp_path / "models" / f"{record.key}.safetensors"
    tensors, said = read(path)
    for change in ({"layers": 10**9}, {"d_model": 10**9, "heads": 1}, {"length": 2**62}, {"feedforward": 25}):
        write(path, tensors, said | {"configs": [said["configs"][0] | change]})
        with pytest.raises(ModelFileError, match="the weights are not those of"):
            Store(tmp_path).model(record.key)
    write(path, tensors, said | {"members": 10**9})
    with pytest.raises(ModelFileError, match="does not say what its members are"):
        Store(tmp_path).model(record.key)


def test_a_checkpoint_of_an_older_version_is_said_and_started_over(tmp_path, steps, monkeypatch, caplog):
    monkeypatch.setattr("primaldual.training.run.files.remove", lambda path: None)
    train(toy(), "softmax", small(), folder=tmp_path)
    (path,) = (tmp_path / "checkpoints").iterdir()
    tensors, about = read(path)
    write(path, tensors, {name: x for name, x in about.items() if name != "evaluated"})
    (record,) = tmp_path.glob("*.json")
    record.unlink()
    del steps[:]
    with caplog.at_level("WARNING"):
        train(toy(), "softmax", small(), folder=tmp_path)
    assert "of an older version" in caplog.text and len(steps) == 6


@pytest.mark.parametrize("seeds", [(), (0, 0), (-1,), (0.5,)])
def test_seeds_that_cannot_be_are_refused(seeds):
    with pytest.raises(ValueError, match="different integers of at least 0"):
        train(toy(), "softmax", small(), seeds)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"validation": 1.0}, r"share in \[0, 1\)"),
        ({"optimizer": "sgd"}, "optimizer must be one of radam, adam, adamw"),
        ({"dtype": "float16"}, "dtype must be one of"),
        ({"epochs": 0}, "epochs must be an integer of at least 1"),
        ({"epochs": None}, "give epochs or steps, got epochs=None and steps=None"),
        ({"steps": 3}, "give epochs or steps, got epochs=1 and steps=3"),
        ({"clip": 0.0}, "clip must be a positive number"),
        ({"weight_decay": 0.1}, "weight_decay is of optimizer 'adamw', got 'radam'"),
        ({"accumulate": 65}, "a batch of 64 cannot be divided into 65 parts"),
        ({"schedule": "cosine"}, r"schedule must be one such as Cosine\(warmup=100\), got 'cosine'"),
        ({"model": 64}, r"model must be sizes such as SeriesSizes\(d_model=128\), got 64"),
    ],
)
def test_recipes_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**{"epochs": 1} | settings)


def test_a_recipe_that_is_not_for_the_task_is_refused():
    with pytest.raises(ValueError, match="patience needs a validation share"):
        train(toy(), "softmax", small(patience=3))
    task = SeriesTask(toy(), "softmax", small().model)
    for recipe, message in [
        (Recipe(epochs=1), r"the recipe's model must be SeriesSizes\(encoder='mvts', d_model=16"),
        (small(balanced=True), "the recipe says balanced=True, the task False"),
    ]:
        with pytest.raises(ValueError, match=message):
            train(task, recipe=recipe)
    with pytest.raises(ValueError, match="a task has its own mechanism"):
        train(task, "bn", small())
    with pytest.raises(ValueError, match="a task needs a recipe"):
        train(task)
