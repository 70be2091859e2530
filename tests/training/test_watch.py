"""Progress, curves and tuning."""

import re
import sys
from io import StringIO
from itertools import count
from statistics import fmean

import pytest
import torch
from rich.console import Console

from primaldual import mechanism, mechanisms
from primaldual.training import (
    MissingPackageError,
    Progress,
    csv_log,
    log_lines,
    progress_bar,
    tensorboard,
    train,
    tune,
)
from primaldual.training.tuning import score, tunable, with_settings
from training.toy import small, toy


def test_the_bar_shows_epochs_time_left_and_what_members_say():
    console = Console(file=StringIO(), force_terminal=True, width=80)
    with progress_bar(console, "JapaneseVowels, linear-bn+sh") as watch:
        watch(Progress(107, 400, (0, 1), {"loss": (0.5, 1.5), "test": (90.0, 100.0)}))
        watch(Progress(108, 400, (1,), {"loss": (1.0,), "test": (91.0,)}, ("seed 0 stops [really]",)))
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())
    assert "JapaneseVowels" in shown and "108/400 epochs" in shown and "loss 1, test 91" in shown
    assert re.search(r"epochs +(-|\d).*loss 1, test 91", shown)  # with the time that is left between
    assert "seed 0 stops [really]" in shown
    assert all(len(line) <= 80 for line in re.split(r"[\r\n]+", shown))


def test_off_a_terminal_there_are_lines_and_no_blank_one():
    console = Console(file=StringIO(), width=80)
    with progress_bar(console, "Toy [bn]") as watch:
        for epoch in range(1, 41):
            message = ("seed 0 stops [really]",) if epoch == 7 else ()
            watch(Progress(epoch, 40, (0,), {"loss": (1 / epoch,), "test": (90.0 + epoch / 10,)}, message))
    lines = console.file.getvalue().splitlines()
    when = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d Toy \[bn\]: "
    assert re.fullmatch(when + "epoch 1 of 40, loss 1, test 90.1", lines[0])
    assert re.fullmatch(when + r"epoch 5 of 40, loss 0.2, test 90.5, \d:\d\d:\d\d left", lines[1])
    assert re.fullmatch(when + r"seed 0 stops \[really\]", lines[2])
    assert re.fullmatch(when + "epoch 40 of 40, loss 0.025, test 94", lines[-1])
    assert len(lines) == 1 + 10 + 1


def test_a_slow_training_says_every_minute_how_far_it_is(monkeypatch):
    clock = iter((0.0, 30.0, 61.0, 100.0, 122.0))
    monkeypatch.setattr("primaldual.training.watch.time.monotonic", lambda: next(clock))
    said = []
    watch = log_lines(said.append, "Toy")
    watch(Progress(1, 400, (0,), {"loss": (1.0,)}))
    for share in (0.1, 0.2, 0.3, 0.4):
        watch(Progress(1 + share, 400, (0,), {}))
    assert [line.partition("Toy: ")[2] for line in said] == [
        "epoch 1 of 400, loss 1", "epoch 1.2 of 400, 1 day, 9:47:14 left", "epoch 1.4 of 400, 1 day, 9:46:13 left"
    ]  # fmt: skip


def test_a_csv_file_has_a_line_per_epoch_and_seed_and_goes_on_with_the_training(tmp_path):
    path, recipe = tmp_path / "log.csv", small(epochs=4)

    def stop(progress):
        if progress.done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # the checkpoint is of an earlier epoch
        train(toy(), "bn", recipe, (0, 3), folder=tmp_path, every=0.0, watch=[csv_log(path), stop])
    records = train(toy(), "bn", recipe, (0, 3), folder=tmp_path, watch=[csv_log(path)])
    heading, *lines = [line.split(",") for line in path.read_text().splitlines()]
    assert heading == ["epoch", "seed", "seconds", "loss", "test"]
    for record in records:
        own = [line for line in lines if line[1] == str(record.seed)]
        assert [float(line[0]) for line in own] == record.history["epoch"]
        assert [float(line[3]) for line in own] == record.history["loss"]
        assert [float(line[4]) for line in own] == record.history["test"]


def test_a_csv_file_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "log.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="has other columns, 'a,b'; choose another file"):
        train(toy(), "bn", small(), watch=[csv_log(tmp_path / "log.csv")])
    assert (tmp_path / "log.csv").read_text() == "a,b\n1,2\n"


def test_a_watch_sees_every_evaluation():
    seen = []
    records = train(toy(), "softmax", small(epochs=3), (0, 1), watch=[seen.append])
    assert [one.done for one in seen] == [1, 2, 3] and seen[0].total == 3
    for i, record in enumerate(records):
        assert record.history["test"] == [one.values["test"][i] for one in seen]


def test_a_slow_epoch_is_seen_to_move(monkeypatch):
    """On a CPU, once a second; the clock of this test jumps."""
    clock = count()
    monkeypatch.setattr("primaldual.training.loop.time.perf_counter", lambda: float(next(clock)))
    seen = []
    with torch.no_grad():  # as in a notebook; training asks for gradients by itself
        train(toy(), "softmax", small(epochs=2), (3, 4), watch=[seen.append])
    assert [round(one.done, 2) for one in seen] == [0.33, 0.67, 1, 1, 1.33, 1.67, 2, 2]
    assert all(one.seeds == (3, 4) and bool(one.values) == (i % 4 == 3) for i, one in enumerate(seen))
    console = Console(file=StringIO(), force_terminal=True, width=160)
    with progress_bar(console, "Toy") as watch:
        for one in seen[2:6]:
            watch(one)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())
    assert "1/2 epochs" in shown and f"loss {fmean(seen[3].values['loss']):.4g}" in shown


def test_curves_go_to_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tensorboard(tmp_path) as watch:
        (record,) = train(toy(), "softmax", small(epochs=3), (5,), watch=[watch])
    found = EventAccumulator(str(tmp_path)).Reload().Scalars("test/seed 5")
    assert [event.step for event in found] == [1, 2, 3]
    assert [event.value for event in found] == pytest.approx(record.history["test"])


@pytest.mark.parametrize("package", ["tensorboard", "optuna"])
def test_a_missing_package_is_named(monkeypatch, tmp_path, package):
    module = {"tensorboard": "torch.utils.tensorboard", "optuna": "optuna"}[package]
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPackageError, match=f"needs {package}: pip install {package}"):
        if package == "optuna":
            tune(toy(), "bn", small(), folder=tmp_path)
        else:
            with tensorboard(tmp_path):
                pass


@pytest.mark.parametrize("name", mechanisms())
def test_what_can_be_tuned_is_what_the_name_says(name):
    names = tunable(mechanism(name))
    assert ("beta" in names) == ("bn" in name) and ("coarsest" in names) == ("sh" in name)
    settings = {"beta": 0.35, "coarsest": 4}
    tuned = with_settings(mechanism(name), 8, **{name: settings[name] for name in names})
    options = {"beta": 0.35, "scales": (1, 1, 1, 2, 2, 2, 4, 4)}
    given = {"beta": "beta", "coarsest": "scales"}
    assert tuned == mechanism(name, **{given[n]: options[given[n]] for n in names})


def test_the_paper_s_scales_are_among_those_that_are_tried():
    assert with_settings(mechanism("sh"), 8, coarsest=8).training_set.scales == (1, 1, 2, 2, 4, 4, 8, 8)
    assert with_settings(mechanism("sh"), 8, coarsest=1).training_set.scales == (1,) * 8
    assert tunable(mechanism("bn", learnable=True)) == ()


def test_settings_are_scored_on_what_is_held_out_of_the_training_set():
    data, recipe = toy(40, 10), small(validation=0.25, epochs=3)
    records = train(data, "bn", recipe, (0, 1))
    expected = sum(max(record.history["validation"]) for record in records) / 2
    assert score(data, mechanism("bn"), recipe, (0, 1)) == expected
    assert score(data, mechanism("bn"), small(validation=0.25, learning_rate=1e200, epochs=3), (0,)) is None


def test_a_search_goes_on_where_it_was(tmp_path):
    pytest.importorskip("optuna")
    data, recipe = toy(40, 10), small(epochs=2)
    seen = []
    first = tune(data, "bn+sh", recipe, folder=tmp_path, trials=2, watch=lambda *trial: seen.append(trial))
    assert seen[0][1] == {"beta": 1.0, "coarsest": 8} and first.trials == 2
    found = tune(data, "bn+sh", recipe, folder=tmp_path, trials=4, watch=lambda *trial: seen.append(trial))
    assert [number for number, _, _ in seen] == [0, 1, 2, 3] and found.trials == 4
    assert found.value == max(value for _, _, value in seen)
    assert found.primal == with_settings(mechanism("bn+sh"), 8, **found.settings)
    with pytest.raises(ValueError, match="nothing to tune"):
        tune(data, "softmax", recipe, folder=tmp_path)


def test_a_search_where_another_is_under_way_is_an_error_that_says_so(tmp_path):
    pytest.importorskip("optuna")

    def another(*_):
        with pytest.raises(ValueError, match=r"tune\.lock: a search is under way in this folder"):
            tune(toy(), "bn", small(), folder=tmp_path, trials=1)

    tune(toy(), "bn", small(), folder=tmp_path, trials=1, watch=another)


def test_an_interrupted_search_tries_what_it_would_have_tried(tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    data, recipe, calls = toy(), small(), []

    def search(folder):
        seen = []
        found = tune(data, "bn+sh", recipe, folder=folder, trials=3, watch=lambda _, *trial: seen.append(trial))
        return seen, found

    def interrupted(*arguments, **settings):
        calls.append(arguments)
        if len(calls) in (1, 3):
            raise KeyboardInterrupt
        return score(*arguments, **settings)

    expected = search(tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[tune.__module__], "score", interrupted)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                search(tmp_path / "parts")
    seen, found = search(tmp_path / "parts")
    assert seen == expected[0][1:] and found == expected[1]
