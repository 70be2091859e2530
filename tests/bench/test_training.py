"""The training step that is measured is the recipe's, of random series of the set's sizes."""

import json
import math
from dataclasses import asdict

import pytest
import torch

from primaldual.bench import training
from primaldual.bench.long_case import LongCase
from primaldual.bench.rivals import LongLoop, SeriesLoop
from primaldual.bench.training import TrainingBench
from primaldual.bench.training_case import TrainingCase
from primaldual.bench.training_plot import training_plot
from primaldual.bench.training_targets import REFERENCE, TARGETS, results_tables, targets_table, verdicts
from primaldual.data import manifest
from primaldual.paper.families import blank
from primaldual.paper.recipes import recipe_for

CPU = torch.device("cpu")
LONG = ("lra-listops", "lra-text", "lra-retrieval", "lra-image")
SMALL = TrainingCase("JapaneseVowels", seeds=2, dtype="float32", batch=4, steps=8)
FIGURES = ("ms_per_step_per_seed", "rival_ms_per_step_per_seed", "ratio")


def made(case, ms, peak=2**30):
    """A record as `measure` would make it."""
    recipe, sizes = case.recipe, case.recipe.model
    record = asdict(case) | {"batch": recipe.batch_size, "length": case.length, "full_size": case.full_size}
    record |= {"d_model": sizes.d_model, "layers": sizes.layers, "error": None, "executor": "sdpa", "ratio": 0.1}
    record |= {"ms_per_step_per_seed": ms, "rival_ms_per_step_per_seed": 10 * ms, "steps_per_second": 1e3 / ms}
    record |= {"peak_bytes_per_seed": peak, "rival_peak_bytes_per_seed": 4 * peak}
    if case.dataset not in REFERENCE:
        return record | {"memory_ratio": 0.1}
    return record | {"reference": REFERENCE[case.dataset]._asdict()}


def of_an_h200(records):
    content = {"environment": {"device": "NVIDIA H200"}, "records": records}
    return content | verdicts(content)


@pytest.mark.parametrize("name", ["SpokenArabicDigits", "Heartbeat", "SelfRegulationSCP1", "EthanolConcentration"])
def test_a_case_is_the_papers_model_and_batch(name):
    case = TrainingCase(name)
    recipe, config = recipe_for(blank(name)), case.config()
    assert case.full_size and case.recipe.batch_size == recipe.batch_size == 64
    assert config == recipe.model.config(blank(name), "softmax") and config.dropout == 0.1
    assert not TrainingCase(name, batch=8).full_size and not TrainingCase(name, steps=8).full_size


def test_the_executor_reaches_the_ensembles_model():
    case = TrainingCase("Heartbeat", impl="sdpa")
    assert case.config().impl == case.task(blank("Heartbeat")).config.impl == "sdpa"


@pytest.mark.parametrize(("name", "unequal"), [("JapaneseVowels", True), ("Heartbeat", False)])
def test_series_have_the_published_sizes_and_padding_where_lengths_differ(name, unequal):
    data, entry = TrainingCase(name).data(), manifest()[name]
    assert data.train.x.shape == (entry.cases[0][0], entry.length, entry.channels)
    assert data.outputs == entry.classes and int(data.train.y.max()) == entry.classes - 1
    assert (data.train.padding is not None) == unequal
    if unequal:
        assert data.train.x[data.train.padding].abs().max() == 0
        assert data.train.lengths.min() >= 7 and data.train.lengths.max() == entry.length


def test_a_set_smaller_than_the_batch_is_one_batch():
    assert TrainingCase("BasicMotions").recipe.batch_size == 40


@pytest.mark.parametrize(
    "case",
    [SMALL, TrainingCase("AppliancesEnergy", "bn", seeds=1, dtype="float32", batch=4, steps=8)],
    ids=["padded", "regression"],
)
def test_a_record_says_what_was_measured(case, monkeypatch):
    monkeypatch.setattr(training, "SAMPLE_SECONDS", 1e-3)
    record = TrainingBench(CPU, repeats=3, budget=0.0).measure(case)
    assert record["error"] is None, record["error"]
    assert (record["batch"], record["length"], record["seeds"], record["repeats"]) == (4, 8, case.seeds, 3)
    assert record["padded"] == (case is SMALL) and record["dropout"] == 0.1
    for name in FIGURES:
        assert 0 < record[f"{name}_min"] <= record[name] <= record[f"{name}_max"]
    assert record["steps_per_second"] == pytest.approx(1e3 / record["ms_per_step_per_seed"])
    assert record["peak_bytes_per_seed"] is None and "reference" not in record and not record["captured"]
    assert json.loads(json.dumps(record, allow_nan=False)) == record


def test_time_is_divided_by_the_seeds(monkeypatch):
    monkeypatch.setattr(training, "in_turns", lambda *given: [[0.4, 0.5]] * 3)
    record = TrainingBench(CPU, repeats=3).measure(SMALL)
    assert [record[name] for name in FIGURES] == pytest.approx([200.0, 500.0, 0.4])


def test_the_rival_takes_a_step_of_the_same_recipe():
    data = SMALL.data()
    loop = SeriesLoop(SMALL, data, CPU)
    before = [p.detach().clone() for p in loop.model.parameters()]
    loop(torch.arange(4))
    assert loop.model.training and loop.model.config.impl == "sdpa"
    assert isinstance(loop.optimizer, torch.optim.RAdam)
    assert all(not torch.equal(a, b) for a, b in zip(loop.model.parameters(), before, strict=True))
    norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in loop.model.parameters()]))
    assert norm <= SMALL.recipe.clip * (1 + 1e-5)


@pytest.mark.parametrize("name", LONG)
def test_a_step_on_long_sequences_is_measured_against_written_out_softmax(name, monkeypatch):
    monkeypatch.setattr(training, "SAMPLE_SECONDS", 1e-3)
    case = LongCase(name, "bn+sh", seeds=1, dtype="float32", batch=2, steps=64)
    record = TrainingBench(CPU, repeats=3, budget=0.0).measure(case)
    assert record["error"] is None, record["error"]
    assert (record["batch"], record["length"], record["heads"], record["full_size"]) == (2, 64, 2, False)
    assert LongCase(name).full_size and LongCase(name).length == record["length"] * {"lra-image": 16}.get(
        name, 32 if name == "lra-listops" else 64
    )


def test_written_out_softmax_is_the_model_s_own():
    case = LongCase("lra-retrieval", dtype="float32", batch=2, steps=32)
    task, rows = case.task(case.data()), torch.arange(2)
    loop = LongLoop(task, case.recipe, CPU)
    batch = task.take(loop.tensors, rows)
    assert bool(batch[1].any())
    model = task.build().eval()
    loop.model.eval().load_state_dict({n.replace("in_proj_", ""): x for n, x in model.state_dict().items()})
    torch.testing.assert_close(loop.model(*batch[:2]), model(*batch[:2]), rtol=1e-5, atol=1e-6)
    before = [p.detach().clone() for p in loop.model.parameters()]
    loop(rows)
    assert any(not torch.equal(a, b) for a, b in zip(before, loop.model.parameters(), strict=True))


def test_a_refused_case_becomes_a_record_that_says_why():
    record = TrainingBench(CPU, repeats=3).measure(TrainingCase("Heartbeat", impl="ragged", batch=2, steps=8))
    assert "impl='ragged' cannot compute this" in record["error"] and "ratio" not in record


def test_verdicts_are_those_of_the_cases_that_the_targets_name():
    cases = [TrainingCase(name, impl=impl) for name in REFERENCE for impl in ("auto", "sdpa")]
    cases += [LongCase(name) for name in LONG]
    records = [made(case, 4.0) for case in cases]
    records += [made(LongCase(name, "bn+sh"), 3.0) for name in ("lra-text", "lra-retrieval")]
    content = of_an_h200(records)
    found = {(t["name"], t["figure"]): t["met"] for t in content["targets"]}
    assert len(found) == len(TARGETS)
    assert found["EthanolConcentration, library kernels", "ms_per_step_per_seed"] is True
    assert found["EthanolConcentration", "ms_per_step_per_seed"] is False
    assert found["EthanolConcentration", "peak_bytes_per_seed"] is True
    assert found["lra-listops", "ms_per_step_per_seed"] is False and found["lra-text", "memory_ratio"] is True
    (ratio,) = (t["value"] for t in content["targets"] if t["name"] == "lra-text, bn+sh ÷ softmax")
    assert ratio == 0.75
    assert targets_table(content).row_count == len(TARGETS)
    assert training_plot(content).startswith(b"\x89PNG")
    for other in ({"seeds": 4}, {"batch": 8}, {"mechanism": "bn"}):
        assert of_an_h200([made(TrainingCase("Heartbeat", **other), 4.0)])["targets"] == []
    assert verdicts(content | {"environment": {"device": "NVIDIA A100"}}) == {"targets": []}


def test_a_figure_that_is_missing_misses_its_target():
    refused = made(TrainingCase("Heartbeat"), 1.0) | {"error": "out of memory"}
    del refused["ms_per_step_per_seed"]
    content = of_an_h200([refused])
    assert [(t["value"], t["met"]) for t in content["targets"]] == [(None, False)]
    assert results_tables(content)[0].row_count == 1
    assert training_plot(content) is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["JapaneseVowels", "Heartbeat"])
def test_a_gpu_record_has_memory(name):
    record = TrainingBench(torch.device("cuda"), repeats=3, budget=0.5).measure(TrainingCase(name, seeds=2))
    assert record["error"] is None, record["error"]
    assert record["full_size"] and record["dtype"] == "bfloat16" and record["captured"]
    assert record["peak_bytes_per_seed"] > 0 and record["rival_peak_bytes_per_seed"] > 0
    assert math.isfinite(record["ratio"]) and record["ratio"] > 0
