"""`primaldual bench` prints a table, writes a record and a picture, and fails in one line."""

import json
import re
from dataclasses import asdict, replace

import pytest
import torch
from typer.testing import CliRunner, Result

import primaldual
from primaldual.base import environment
from primaldual.bench import ceilings, measure, regression, targets, training
from primaldual.cli import app, bench_training

TINY = ("--device", "cpu", "--lengths", "16,64", "--batch", "1", "--heads", "4", "--head-dims", "8", "--repeats", "3")


def call(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["bench", *arguments])


def one_line(result: Result) -> str:
    (line,) = result.stderr.strip().splitlines()
    return line


@pytest.fixture
def quick_ceilings(monkeypatch):
    """The ceilings of a slow machine, at once."""
    made = measure.Ceilings(1e9, {"float32": 1e10})
    monkeypatch.setattr(measure, "measure_ceilings", lambda *given: made)


def test_kernels_writes_a_table_a_record_and_a_picture(tmp_path, monkeypatch):
    monkeypatch.setitem(ceilings.COPIED, "cpu", 2**10)
    monkeypatch.setitem(ceilings.SIDE, "cpu", 8)
    path = tmp_path / "out" / "kernels.json"
    result = call("kernels", *TINY, "--mechanisms", "bn,conv2d", "--output", str(path), "--lengths", "16,20",
                  "--steps", "forward+backward")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "kernels, forward+backward, eager: float32, 4 heads of 8" in result.stdout
    assert "20 tokens less 0 prefix tokens are 20, not a square" in " ".join(result.stdout.split())
    assert sorted(file.name for file in path.parent.iterdir()) == ["kernels.json", "kernels.png"]
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")

    content = json.loads(path.read_text())
    assert content["complete"] is True
    environment = content["environment"]
    assert environment["torch"] == torch.__version__ and environment["primaldual"] == primaldual.__version__
    assert {"python", "triton", "device", "system", "compiled", "threads"} <= set(environment)
    assert environment["command"].startswith("primaldual bench kernels --lengths 16,20 --batch 1 --heads 4")
    assert str(tmp_path) not in path.read_text()
    assert content["ceilings"]["bytes_per_second"] > 0 and content["ceilings"]["flops_per_second"]["float32"] > 0
    records = content["records"]
    assert [(r["mechanism"], r["length"]) for r in records] == [(n, x) for n in ("bn", "conv2d") for x in (16, 20)]
    assert [r["length"] for r in records if r["error"]] == [20]
    measured = next(r for r in records if not r["error"])
    assert {
        "seconds", "rival", "rival_seconds", "ratio", "ratio_min", "ratio_max", "repeats", "flops_share",
        "bytes_share", "peak_bytes", "arithmetic_limit", "executor",
    } <= set(measured)  # fmt: skip


def test_layers_write_where_results_belong(tmp_path, monkeypatch, quick_ceilings):
    monkeypatch.chdir(tmp_path)
    options = ("--mechanisms", "bn+sh", "--scales", "1,1,2,2", "--no-plot", "--steps", "forward", "--impl", "separate")
    result = call("layers", *TINY, *options)
    assert result.exit_code == 0, result.output
    assert [file.name for file in (tmp_path / "results" / "cpu").iterdir()] == ["layers.json"]
    content = json.loads((tmp_path / "results" / "cpu" / "layers.json").read_text())
    assert {(r["subject"], r["impl"], r["error"]) for r in content["records"]} == {("layers", "separate", None)}
    assert "--no-plot" in content["environment"]["command"]


def test_an_interrupted_run_says_what_was_written(tmp_path, monkeypatch, quick_ceilings):
    right = measure.AttentionBench.measure

    def interrupted(self, case):
        if case.length == 64:
            raise KeyboardInterrupt
        return right(self, case)

    monkeypatch.setattr(measure.AttentionBench, "measure", interrupted)
    path = tmp_path / "kernels.json"
    result = call("kernels", *TINY, "--mechanisms", "bn", "--output", str(path))
    assert result.exit_code == 130
    assert "stopped after 1 of 4" in result.stderr
    content = json.loads(path.read_text())
    assert content["complete"] is False and len(content["records"]) == 1


def test_a_record_that_cannot_be_written_is_one_line(tmp_path, quick_ceilings):
    (tmp_path / "file").write_text("in the way")
    path = tmp_path / "file" / "kernels.json"
    result = call("kernels", *TINY, "--mechanisms", "bn", "--steps", "forward", "--output", str(path))
    assert result.exit_code == 1
    assert "could not be written" in one_line(result) and "--output" in one_line(result)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--mechanisms", "softmx"), "did you mean 'softmax'"),
        (("--dtypes", "int8"), "--dtypes takes bfloat16"),
        (("--lengths", "long"), "--lengths takes positive integers"),
        (("--lengths", "0"), "--lengths takes positive integers"),
        (("--mode", "captured"), "needs a CUDA device"),
        (("--tf32",), "--tf32 needs a CUDA device"),
        (("--impl", "magic"), "--impl must be one of auto"),
        (("--impl", "pooled"), "--impl must be one of auto"),  # a route, which layers have
        (("--dropout", "1"), "--dropout must be in [0, 1)"),
        (("--steps", "sideways"), "--steps takes forward"),
        (("--preset", "dreams"), "--preset must be targets or language"),
        (("--preset", "targets", "--heads", "4"), "leave out --heads"),
    ],
)
def test_bad_options_fail_in_one_line(arguments, said):
    result = call("kernels", "--device", "cpu", *arguments)
    assert result.exit_code == 2
    assert said in one_line(result)
    assert result.stdout == ""


def test_help_says_how_it_measures():
    plain = re.sub(r"\x1b\[[0-9;]*m", "", call("kernels", "--help").stdout)
    for preset in targets.PRESETS:
        assert f"primaldual bench kernels --preset {preset}" in plain
    assert "eager ÷ eager" in plain and "read + written" in plain


@pytest.mark.parametrize(("ratio", "status"), [(0.01, 0), (0.7, 1)])
def test_a_missed_target_sets_the_exit_status(tmp_path, monkeypatch, quick_ceilings, ratio, status):
    figures = {"ratio": ratio, "bytes_share": 0.9, "memory_ratio": ratio, "memory_ratio_materialised": ratio}
    record = figures | {"error": None, "rival": "cudnn"}
    monkeypatch.setattr(measure.AttentionBench, "measure", lambda self, case: asdict(case) | record)
    path = tmp_path / "targets.json"
    result = call("kernels", "--device", "cpu", "--preset", "targets", "--output", str(path))
    assert result.exit_code == status, result.output
    assert ("MISSED" in result.stdout) == bool(status) and "≤ 1.1" in result.stdout
    assert len(json.loads(path.read_text())["targets"]) == len(targets.TARGETS["cpu"])
    assert path.with_suffix(".png").exists()


def test_layers_of_language_models_are_measured_on_a_cpu_and_nothing_must_be_reached(
    tmp_path, monkeypatch, quick_ceilings
):
    small = tuple(replace(case, length=24, batch=1, head_dim=8) for case in targets.cases("cpu", "language")[:2])
    monkeypatch.setitem(targets._BESIDE, "language", {"cpu": small})
    path = tmp_path / "language.json"
    result = call("kernels", "--device", "cpu", "--preset", "language", "--repeats", "3", "--output", str(path))
    assert result.exit_code == 0, result.output
    content = json.loads(path.read_text())
    assert content["targets"] == [] and [r["error"] for r in content["records"]] == [None, None]
    assert [(r["subject"], r["rival"]) for r in content["records"]] == [("kernels", "sdpa"), ("layers", "default")]
    assert "gate+sh, rotary" in result.stdout and "eager, causal: float32" in result.stdout


def test_training_writes_a_table_a_record_and_a_picture(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "SAMPLE_SECONDS", 1e-3)
    path = tmp_path / "training.json"
    result = call(
        "training", "--device", "cpu", "--quick", "--only", "BasicMotions", "--batch", "2", "--steps", "8",
        "--mechanisms", "softmax", "--impl", "auto,ragged", "--output", str(path),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert "training step: softmax, float32, 2 seeds together, sizes below the paper's" in said
    assert "BasicMotions, softmax, ragged: impl='ragged' cannot compute this" in said
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")

    content = json.loads(path.read_text())
    assert content["complete"] is True and content["targets"] == []
    assert content["environment"]["command"].startswith(
        "primaldual bench training --only BasicMotions --mechanisms softmax --batch 2"
    )
    assert str(tmp_path) not in path.read_text()
    assert [(r["dataset"], r["impl"]) for r in content["records"]] == [
        ("BasicMotions", impl) for impl in ("auto", "ragged")
    ]
    assert {
        "dataset", "mechanism", "impl", "executor", "seeds", "dtype", "batch", "length", "channels", "outputs",
        "series", "padded", "full_size", "dropout", "layers", "d_model", "heads", "ms_per_step_per_seed",
        "rival_ms_per_step_per_seed", "ratio", "ratio_min", "ratio_max", "steps_per_second", "rival_steps_per_second",
        "peak_bytes_per_seed", "rival_peak_bytes_per_seed", "memory_ratio", "repeats", "steps_per_sample", "error",
    } <= set(content["records"][0])  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--only", "Hartbeat"), "; got 'Hartbeat'; did you mean 'Heartbeat'?"),
        (("--only", "zzz"), "--only takes EthanolConcentration"),
        (("--only", ","), "nothing to measure"),
        (("--mechanisms", "softmx"), "did you mean 'softmax'"),
        (("--mechanisms", "linear-bn", "--only", "BasicMotions"), "no β of linear-bn for BasicMotions"),
        (("--dtype", "float64"), "--dtype takes bfloat16, float32; got 'float64'"),
        (("--impl", "magic"), "--impl takes auto, linear"),
        (("--device", "tpu"), "--device takes cpu, cuda or cuda:N; got 'tpu'"),
    ],
)
def test_training_refuses_in_one_line(tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    result = call("training", "--device", "cpu", *arguments)
    assert result.exit_code == 2
    assert said in one_line(result)
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("ms", "options", "status"), [(0.1, (), 0), (9.0, (), 1), (9.0, ("--repeats", "3"), 1), (9.0, ("--quick",), 0)]
)
def test_a_missed_training_target_fails_a_run_with_the_defaults(tmp_path, monkeypatch, ms, options, status):
    def measured(self, case):
        return asdict(case) | {
            "batch": 64, "length": case.length, "full_size": True, "layers": 1, "d_model": 64, "executor": "sdpa",
            "error": None, "ms_per_step_per_seed": ms, "rival_ms_per_step_per_seed": 9.0, "ratio": ms / 9,
            "steps_per_second": 1.0, "peak_bytes_per_seed": 2**30, "rival_peak_bytes_per_seed": 2**30,
        }  # fmt: skip

    monkeypatch.setattr(bench_training, "DEFAULTS", {"cpu": bench_training.DEFAULTS["cuda"]})
    monkeypatch.setattr(environment, "device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(training.TrainingBench, "measure", measured)
    path = tmp_path / "training.json"
    result = call("training", "--device", "cpu", "--no-plot", "--output", str(path), *options)
    assert result.exit_code == status, result.output
    assert ("MISSED" in result.stdout) == (ms > 1) and "≤ 0.6 ms" in result.stdout
    assert len(json.loads(path.read_text())["targets"]) == (2 if options == ("--quick",) else 8)


def test_regression_compares_with_scikit_learn_at_its_gap(tmp_path, monkeypatch):
    case = regression.RegressionCase("C = N", 4, 12.0, must=1e-9, heads=2, outputs=3, length=12)
    monkeypatch.setattr(regression, "CASES", (case,))
    path = tmp_path / "regression.json"
    result = call("regression", "--device", "cpu", "--sample", "1", "--output", str(path))
    assert result.exit_code == 1
    assert one_line(result) == "error: 1 of 1 targets missed"
    assert "2 heads × 3 outputs, N = 12, ε 0.05" in result.stdout
    (record,) = json.loads(path.read_text())["records"]
    assert record["ratio"] == pytest.approx(record["seconds"] / record["loop_seconds"])
    assert 0 < record["loop_gap"] < 1e-2 and record["gap"] <= record["loop_gap"]
