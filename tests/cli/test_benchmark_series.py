"""`primaldual benchmark-series`: run, stopped, resumed, reported."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from bench.series_files import write_set
from primaldual.cli import app

TESTS = Path(__file__).parents[1]
RIVALS = "bench.series_rivals."


@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    write_set(folder, "First", unequal=True, missing=True)
    write_set(folder, "Second", cases=15)
    write_set(folder / "Third", "Third", regression=True)
    return folder


def command(sets: Path, output: Path, rivals: str, *more: object) -> list[str]:
    against = ",".join(RIVALS + name for name in rivals.split())
    return ["benchmark-series", *map(str, (sets, "--no-ours", "--against", against, "--output", output, *more))]


def call(*arguments: object, charset: str = "utf-8", columns: int = 80) -> Result:
    return CliRunner(charset=charset, env={"COLUMNS": str(columns)}).invoke(app, command(*arguments))


def records(output: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in output.glob("records/*/*/*.json")}


@pytest.fixture(scope="module")
def ran(sets, tmp_path_factory) -> tuple[Path, Result]:
    """Everything that can happen, in one run."""
    output = tmp_path_factory.mktemp("out")
    rivals = "Nearest Guess Broken Killed Slow Mean NotFinite"
    result = call(sets, output, rivals, "--seeds", 2, "--time-limit", 1, "--no-plot")
    return output, result


def test_what_fails_is_recorded_and_shown_and_the_others_go_on(ran, sets):
    output, result = ran
    assert result.exit_code == 1, result.output
    said = {}
    for path in records(output):
        record = json.loads(path.read_text())
        said.setdefault(record["method"], {})[record["set"], record["seed"]] = record
    both = {("First", 0), ("Second", 0)}
    assert set(said["Nearest"]) == set(said["Broken"]) == set(said["Killed"]) == both
    assert set(said["Guess"]) == set(said["Slow"]) == {(name, seed) for name in ("First", "Second") for seed in (0, 1)}
    assert set(said["Mean"]) == set(said["NotFinite"]) == {("Third", 0)}
    failures = {name: {one.get("failure") for one in found.values()} for name, found in said.items()}
    assert failures["Broken"] == {"LookupError: it has no screws"}
    assert failures["Killed"] == {"its process was killed, perhaps for want of memory"}
    assert failures["Slow"] == {"stopped after 1 s", "not begun: split 0, seed 0 was stopped after 1 s"}
    assert failures["NotFinite"] == {"ValueError: what it predicts is not finite"}
    assert failures["Nearest"] == failures["Guess"] == failures["Mean"] == {None}
    assert [path.parent.name for path in output.glob("logs/First/*/*") if "last words" in path.read_text()] == [
        "Killed"
    ]
    assert not list(output.glob("locks/*"))
    nearest = said["Nearest"]["First", 0]
    assert nearest["scores"]["accuracy"] > 80 and nearest["scores"]["log_loss"] is None
    assert nearest["sizes"] == {"train": 12, "test": 12, "steps": 8, "shortest": 6, "channels": 2, "classes": 3}
    assert said["Guess"]["Second", 1]["scores"]["accuracy"] == pytest.approx(100 / 3)
    assert said["Mean"]["Third", 0]["scores"]["rmse"] > 5


def test_a_table_fits_80_columns_and_says_what_failed(ran):
    lines = ran[1].stdout.splitlines()
    tables = lines[1 : next(i for i, line in enumerate(lines) if line.startswith("note:"))]
    assert all(len(line) <= 80 for line in lines if not line.startswith("Written:")) and "…" not in "".join(tables)
    text = " ".join(ran[1].stdout.split())
    for part in (
        "First 12", "failed", "Broken: 1 of 1 failed; split 0, seed 0: LookupError: it has no screws",
        "Nearest: padded or cut to the longest training series (First)", "33.33 ± 0.00", "RMSE",
        "Nearest against each, by accuracy",
    ):  # fmt: skip
        assert part in text
    log = ran[1].stderr.splitlines()
    assert len(log) == 16 and "16 of 16:" in log[-1] and "left" in log[5]


def test_a_second_run_does_nothing_and_reports_the_same(ran, sets):
    output, before = ran[0], records(ran[0])
    reports = {path.name: path.read_bytes() for path in output.glob("reports/*")}
    rivals = "Nearest Guess Broken Killed Slow Mean NotFinite"
    again = call(sets, output, rivals, "--seeds", 2, "--time-limit", 1, "--no-plot")
    assert "16 of 16 fits are recorded, 0 to go" in again.stdout and records(output) == before
    assert {path.name: path.read_bytes() for path in output.glob("reports/*")} == reports
    assert sorted(reports) == ["series.csv", "series.json", "series.md"]
    lines = list(csv.DictReader(reports["series.csv"].decode().splitlines()))
    assert len(lines) == 7 and {line["method"] for line in lines} == {"Nearest", "Guess", "Mean"}
    longer = call(sets, output, rivals, "--seeds", 2, "--time-limit", 9, "--dry-run")
    assert longer.exit_code == 0 and "12 of 16 fits are recorded, 4 to go" in longer.stdout
    assert "First, Slow, split 0, seed 0" in longer.stdout


def test_it_can_be_read_in_ascii(ran, sets):
    shown = call(sets, ran[0], "Nearest Guess", "--only-report", "--seeds", 2, "--no-plot", charset="ascii")
    assert shown.exit_code == 0 and "33.33 ? 0.00" in shown.stdout


def test_a_bad_set_is_told_and_the_others_go_on(sets, tmp_path):
    write_set(tmp_path, "Good")
    write_set(tmp_path, "Bad")
    (tmp_path / "Bad_TEST.ts").write_text("nothing")
    result = call(tmp_path, tmp_path / "out", "Mean Nearest", "--no-plot")
    assert result.exit_code == 1 and len(records(tmp_path / "out")) == 1
    assert "Bad_TEST.ts, line 1: expected a tag" in result.stdout
    folds = call(tmp_path, tmp_path / "out", "Nearest", "--no-plot", "--train-only", "--folds", 2, "--jobs", 2)
    assert folds.exit_code == 0 and len(records(tmp_path / "out")) == 5
    assert "test files were not opened" in " ".join(folds.stdout.split())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system holds no process to its memory")
def test_a_fit_that_wants_too_much_memory_fails_alone(sets, tmp_path):
    for limit, failed in ((1, True), (4, False)):
        result = call(sets, tmp_path / "out", "Greedy Guess", "--only", "Second", "--no-plot", "--seeds", 1,
                      "--memory-limit", limit, "--retry")  # fmt: skip
        assert result.exit_code == failed
        assert ("Greedy: 1 of 1 failed; split 0, seed 0: MemoryError: Unable to" in result.stdout) == failed


@pytest.mark.parametrize(
    ("options", "said"),
    [(("--train-only", "--resamples", 2), "with --train-only there are --folds"),
     (("--only", "Frist"), "did you mean 'First'"), (("--against", "forest"), "a method is one of attention,"),
     (("--against", ""), "--against needs methods")],
)  # fmt: skip
def test_what_cannot_be_is_one_line(sets, tmp_path, options, said):
    result = call(sets, tmp_path / "out", "Nearest", *options)
    assert result.exit_code == 2 and said in result.stderr and len(result.stderr.splitlines()) == 1


def test_killed_at_any_point_it_goes_on_where_it_was(sets, tmp_path):
    output, wait = tmp_path / "out", tmp_path / "wait"
    wait.write_text("")
    environment = os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent / 'src'}"}
    arguments = (sets, output, "Nearest Waits", "--only", "Second", "--no-plot", "--train-only", "--folds", 2)
    process = subprocess.Popen(
        [sys.executable, "-m", "primaldual", *command(*arguments)],
        env=environment | {"PRIMALDUAL_TEST_WAIT": str(wait)}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    _until(lambda: wait.read_text())
    process.kill()
    process.wait()
    fit = int(wait.read_text())
    _until(lambda: _is_gone(fit))  # what it had begun does not go on without it
    before = records(output)
    assert [path.parent.name for path in before] == ["Nearest"]

    again = call(*arguments)
    assert again.exit_code == 0, again.output
    assert "1 of 4 fits are recorded, 3 to go" in again.stdout
    after = records(output)
    assert len(after) == 4 and before.items() <= after.items()
    assert not [path for path in output.rglob("*") if path.suffix in (".lock", ".log")]


def _until(found) -> None:
    end = time.monotonic() + 60
    while not found():
        assert time.monotonic() < end
        time.sleep(0.05)


def _is_gone(process: int) -> bool:
    try:
        os.kill(process, 0)
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return True
    return state == "Z"


@pytest.mark.deep
def test_interrupted_it_says_so_and_leaves_no_process(sets, tmp_path):
    wait = tmp_path / "wait"
    wait.write_text("")
    environment = os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent / 'src'}"}
    process = subprocess.Popen(
        [sys.executable, "-m", "primaldual", *command(sets, tmp_path / "out", "Waits", "--only", "Second")],
        env=environment | {"PRIMALDUAL_TEST_WAIT": str(wait)}, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    _until(lambda: wait.read_text())
    process.send_signal(signal.SIGINT)
    try:
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and b"the same command goes on" in said and b"Traceback" not in said
    _until(lambda: _is_gone(int(wait.read_text())))
