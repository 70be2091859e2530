"""The paper's numbers, and the jobs behind them."""

import json
from pathlib import Path
from statistics import fmean

import pytest
import torch

from paper.records import record
from primaldual.data import manifest
from primaldual.models import SequenceClassifier, SeriesTransformer
from primaldual.paper import jobs, recorded, table, table_names
from primaldual.paper.numbers import AVERAGE, BETAS
from primaldual.training import Record

RECORDS = Path(__file__).parents[2] / "results" / "h200" / "runs"


LONG = ("table-lra", "table-lra-conv1d", "table-learnable-beta")
SERIES = tuple(name for name in table_names() if name not in LONG)


@pytest.mark.parametrize("name", [name for name in table_names() if name != "table-learnable-beta"])
def test_the_averages_that_the_paper_prints_are_those_of_its_rows(name):
    of = table(name)
    for column, mechanism in enumerate(of.mechanisms):
        mean = fmean(of.numbers[dataset][column].mean for dataset in of.datasets if dataset not in of.also)
        printed = of.numbers[AVERAGE][column].mean
        if (name, mechanism) == ("table-uea-more", "sh"):  # the paper's own slip
            assert printed == 75.61 and round(mean, 2) == 75.64
        else:  # the Long Range Arena's is cut where others are rounded: 59.286 is printed as 59.28
            assert abs(mean - printed) < (0.01 if name in LONG else 0.0051), mechanism


def test_the_tables_have_the_paper_s_sizes():
    assert {name: len(table(name).datasets) for name in table_names()} == {
        "table-uea": 10, "table-uea-linear": 10, "table-uea-sparse": 10, "table-uea-more": 15, "table-regression": 6,
        "table-lra": 6, "table-lra-conv1d": 6, "table-learnable-beta": 2,
    }  # fmt: skip
    series = {dataset for name in SERIES for dataset in table(name).datasets}
    paper = {dataset for name in LONG for dataset in table(name).datasets if dataset not in table(name).also}
    assert series == set(manifest()) and series | paper == set(BETAS["softmax"])


@pytest.mark.parametrize("name", LONG)
def test_every_run_of_long_sequences_states_a_valid_model(name):
    found = jobs(name, mechanisms=[*table(name).mechanisms, "linear-bn+sh", "sparse-bn+sh"])
    for job in found:
        config = job.config()
        with torch.device("meta"):
            assert SequenceClassifier(config).config == config
        assert (config.heads, config.layers, config.d_model) == (2, 2, 64)
        assert config.pairs == job.dataset.startswith("lra-retrieval")
        assert job.recipe.test_at_end and job.recipe.schedule.anneal == "linear" and job.recipe.clip is None


def test_long_sequences_have_the_paper_s_beta_scales_and_steps():
    def of(dataset, mechanism):
        return jobs("table-lra", [dataset], [mechanism])[0]

    assert of("lra-text", "bn").primal.inputs[0].beta == 0.5
    assert of("lra-text", "bn+sh").primal.inputs[0].beta == 0.8
    assert of("lra-text", "sh").primal.training_set.scales == (1, 2)
    assert of("lra-retrieval-manpages", "bn").primal == of("lra-retrieval", "bn").primal
    assert of("lra-text", "sparse").primal.training_set.pattern.stride == 64
    assert of("lra-text", "conv1d").primal.inputs[0].size == 5
    assert of("lra-retrieval", "learned-bn+sh").primal.inputs[0].learnable
    steps = {name: of(name, "softmax").recipe.steps for name in table("table-lra").datasets}
    assert list(steps.values()) == [5_000, 20_000, 30_000, 35_000, 62_400, 30_000]
    rises = [round(of(name, "softmax").recipe.schedule.rise * many) for name, many in steps.items()]
    assert rises == [1_000, 8_000, 800, 175, 312, 800]


@pytest.mark.parametrize("name", SERIES)
def test_every_run_states_a_valid_model(name):
    extra = [*table(name).mechanisms, "qk-norm"]
    found = jobs(name, mechanisms=extra)
    assert len(found) == 5 * len(table(name).datasets)
    for job in found:
        config = job.config()
        with torch.device("meta"):  # shapes, no memory
            assert SeriesTransformer(config).config == config
        assert config.heads == 8 and job.seeds == (0, 1, 2, 3, 4)
        flowformer = job.dataset in ("PEMS-SF", "SelfRegulationSCP2", "UWaveGestureLibrary")
        assert config.encoder == ("flowformer" if flowformer else "mvts")
        assert job.recipe.epochs == (
            100 if config.task == "regression" or (flowformer and "PEMS" not in job.dataset) else 400
        )


def test_beta_and_scales_are_the_set_s_and_the_family_s_own():
    def of(name, dataset, mechanism):
        return jobs(name, [dataset], [mechanism])[0].primal

    assert of("table-uea", "SelfRegulationSCP2", "bn").inputs[0].beta == 1.2
    assert of("table-uea", "SelfRegulationSCP2", "bn+sh").inputs[0].beta == 0.9
    assert of("table-uea-linear", "SelfRegulationSCP2", "linear-bn").inputs[0].beta == 0.75
    assert of("table-uea-sparse", "SelfRegulationSCP2", "sparse-bn+sh").inputs[0].beta == 0.3
    assert of("table-regression", "IEEEPPG", "bn").inputs[0].beta == 0.4
    assert of("table-uea-sparse", "PEMS-SF", "sparse-sh").training_set.over.scales == (1, 1, 2, 2, 4, 4, 8, 8)


def test_the_committed_records_of_sparse_attention_are_those_of_its_table():
    records = [Record.from_dict(json.loads(path.read_text("utf-8"))) for path in sorted(RECORDS.glob("*.json"))]
    sparse = [one for one in records if one.mechanism["training_set"]["kind"] == "Sparse"]
    assert {one.mechanism["training_set"]["pattern"]["stride"] for one in sparse} == {None}
    of_job = recorded(jobs("table-uea-sparse", dtype="bfloat16"), records)
    found = [one.key for by_seed in of_job.values() for one in by_seed.values()]
    assert sorted(found) == [one.key for one in sparse] and len(found) == 120


def test_tables_share_runs():
    (mine,), (theirs,) = (jobs(name, ["PEMS-SF"], ["softmax"]) for name in ("table-uea", "table-uea-linear"))
    assert mine == theirs
    saved = Record.from_dict(record(mine, 3, [80.0]).to_dict())
    assert recorded([theirs], [saved]) == {theirs: {3: saved}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("table-eua",), "did you mean 'table-uea'"),
        (("table-uea", ["Handwritting"]), "did you mean 'Handwriting'"),
        (("table-uea", ["IEEEPPG"]), "table-uea has no set 'IEEEPPG'"),
        (("table-uea", None, ["softmx"]), "did you mean 'softmax'"),
        (("table-uea", []), "nothing chosen"),
        (("table-regression", None, ["linear-bn"]), "no β of linear-bn for AppliancesEnergy"),
    ],
)
def test_what_is_not_there_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        jobs(*arguments)
