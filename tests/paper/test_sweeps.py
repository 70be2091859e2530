"""Sweeps from records that no training made."""

import csv
from dataclasses import replace
from statistics import fmean

import pytest

from paper.records import record
from primaldual.paper import sweep_text
from primaldual.paper.numbers import SCALES
from primaldual.paper.sweeps import VALUES, Sweep
from primaldual.paper.swept import swept
from primaldual.primal import Strided, mechanism

SETS = ("JapaneseVowels", "NATOPS")
BETA = Sweep("beta", "bn", (0.0, 0.5, 1.0), SETS, (0, 1))


def of(job, seed, validation, test, **options):
    made = record(job, seed, test, **options)
    return replace(made, history=made.history | {"validation": validation})


def records(sweep, level=lambda dataset, value: 0.0):
    """On validation the second epoch is the best; seeds are 1 apart."""
    asked = {sweep.job(name, v): (name, v) for name in sweep.datasets for v in (None, *sweep.tried(name))}
    shift = {job: level(*key) for job, key in asked.items()}
    return [
        of(job, s, [60 + x + s, 70 + x + s, 65 + x + s], [50 + x + s, 51 + x + s, 59 + x + s])
        for job, x in shift.items()
        for s in sweep.seeds
    ]


def test_a_value_that_changes_nothing_is_the_baseline():
    of_set = [job for job in BETA.jobs() if job.dataset == "JapaneseVowels"]
    assert [job.mechanism for job in of_set] == ["softmax", "bn, β 0.5", "bn, β 0.6", "bn, β 1"]
    assert [job.primal for job in of_set] == [mechanism("softmax"), *(mechanism("bn", beta=b) for b in (0.5, 0.6, 1.0))]
    assert {job.recipe.validation for job in of_set} == {0.2}
    ones = Sweep("scales", "sh", VALUES["scales"], SETS)
    assert ones.job("NATOPS", (1,) * 8) == ones.job("NATOPS", None)
    assert len(ones.jobs()) == 2 * len(VALUES["scales"])


def test_the_other_setting_is_the_paper_s_unless_given():
    joint = Sweep("scales", "bn+sh", ((1,) * 8, SCALES), ("NATOPS",))
    assert [job.primal for job in joint.jobs()] == [
        mechanism("softmax"), mechanism("bn", beta=0.4), mechanism("bn+sh", beta=0.4, scales=SCALES),
    ]  # fmt: skip
    assert joint.job("NATOPS", SCALES).primal != replace(joint, other=0.9).job("NATOPS", SCALES).primal
    linear = Sweep("beta", "linear-bn+sh", (0.0, 1.0), ("Handwriting",), other=(2,) * 8)
    assert (linear.baseline, linear.paper("Handwriting")) == ("linear", 0.3)
    assert linear.job("Handwriting", 0.0).primal == mechanism("linear-sh", scales=(2,) * 8)


def test_validation_chooses_and_the_test_set_tells():
    """On test, 1.0 is far better; nothing follows from it."""
    found = swept(BETA, records(BETA, lambda name, v: {0.5: 4.0}.get(v, 0.0) + (v == 1.0 and name == "NATOPS") * 5))
    spoilt = replace(
        found,
        scores={
            (name, v): one._replace(test=dict.fromkeys(one.test, 99.0)) if v == 1.0 else one
            for (name, v), one in found.scores.items()
        },
    )
    for one in (found, spoilt):
        assert [one.chosen(name) for name in SETS] == [0.5, 1.0]
        assert one.best == 0.5
    scores = found.scores["JapaneseVowels", 0.5]
    assert (scores.validation, scores.test, scores.last) == ({0: 74, 1: 75}, {0: 55, 1: 56}, {0: 63, 1: 64})
    assert found.mean_ranks() == {0.0: 2.75, 0.5: 1.5, 1.0: 1.75}
    assert found.gains(lambda _: 0.5, found.chosen, "test") == [[0, 0], [-1, -1]]
    assert found.over_sets(found.chosen).test == {0: 55.5, 1: 56.5}


def test_among_equals_the_default_is_chosen():
    found = swept(BETA, records(BETA, lambda name, v: 2.0 if (name, v) == ("NATOPS", 1.0) else 0.0))
    assert [found.chosen(name) for name in SETS] == [1.0, 1.0] and found.best == 1.0
    assert found.ranks("JapaneseVowels") == {0.0: 2.0, 0.5: 2.0, 1.0: 2.0}


def test_values_that_differ_are_told_from_seeds_that_do():
    sweep = replace(BETA, seeds=tuple(range(5)))
    clear = swept(sweep, records(sweep, lambda _, v: 3.0 if v == 0.5 else 0.0))
    none = swept(sweep, records(sweep))
    assert clear.p("test", SETS) < 0.001 and none.p("test", SETS) == 1.0
    words = "\n".join(sweep_text.verdict(clear))
    assert "The best single value is β 0.5" in words and "do? Yes" in words
    assert "against softmax: +3.00 points, 10 / 0 / 0 (0.002): a difference" in words
    assert "against chosen per set: +0.00 points, 0 / 10 / 0: not told apart" in words
    words = "\n".join(sweep_text.verdict(none))
    assert "The best single value is β 0, which is softmax" in words and "do? Not shown" in words


def test_the_tables_are_exactly_these():
    sweep = replace(BETA, datasets=("NATOPS",), values=(0.0, 0.5))
    found = swept(sweep, records(sweep, lambda _, v: 2.0 * (v or 0)))
    text = sweep_text.markdown(found, "it.png")
    assert text.startswith("# A sweep of beta, bn: accuracy in %\n\n- The best single value is β 0.5:")
    assert (
        """
![the sweep](it.png)

| set | β | validation | rank | test | last |  |
| :-- | :-- | --: | --: | --: | --: | --: |
| NATOPS | 0 | 70.50 ± 0.71 | 2 | 51.50 ± 0.71 | 59.50 ± 0.71 | softmax |
|  | 0.5 | 71.50 ± 0.71 | 1 | 52.50 ± 0.71 | 60.50 ± 0.71 | chosen |
|  | 1 | 72.50 ± 0.71 |  | 53.50 ± 0.71 | 61.50 ± 0.71 | paper's |
| mean of 1 | 0 | 70.50 ± 0.71 | 2 | 51.50 ± 0.71 | 59.50 ± 0.71 | softmax |
|  | 0.5 | 71.50 ± 0.71 | 1 | 52.50 ± 0.71 | 60.50 ± 0.71 | best |
|  | chosen per set | 71.50 ± 0.71 |  | 52.50 ± 0.71 | 60.50 ± 0.71 |  |
|  | the paper's | 72.50 ± 0.71 |  | 53.50 ± 0.71 | 61.50 ± 0.71 |  |

## The best single value, β 0.5, against the others

| against |  | points | wins / ties / losses (p) |
| :-- | :-- | --: | --: |
| chosen per set | validation | +0.00 | 0 / 2 / 0 |
"""
        in text
    )
    rows = list(csv.DictReader(sweep_text.csv(found).splitlines()))
    assert [row["beta"] for row in rows[:3]] == ["0", "0.5", "1"]
    assert float(rows[1]["validation_mean"]) == fmean(found.scores["NATOPS", 0.5].validation.values())


def test_what_failed_or_is_missing_is_said_and_does_not_count():
    made = [one for one in records(BETA) if one.data["name"] == "JapaneseVowels"]
    odd = BETA.job("JapaneseVowels", 0.5)
    made = [one for one in made if one.seed != 1 or one.mechanism != odd.primal.to_dict()]
    found = swept(BETA, [*made, of(odd, 1, [99.0], [99.0], failure="the loss is not finite in epoch 2")])
    assert found.measured == ("JapaneseVowels",)
    assert found.scores["JapaneseVowels", 0.5].validation == {0: 70.0}
    assert any("missing set NATOPS" in note for note in found.notes)
    assert "failed: JapaneseVowels, bn, β 0.5, seed 1: the loss is not finite in epoch 2" in found.notes
    assert "(1 of 2)" in sweep_text.markdown(found) and "| NATOPS | softmax" not in sweep_text.markdown(found)
    nothing = swept(BETA, [])
    assert nothing.measured == () and "Nothing to compare" in sweep_text.markdown(nothing)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"setting": "gamma"}, "a sweep is of beta or scales; got 'gamma'"),
        ({"mechanism": "sh"}, "'sh' has no beta; those that have: bn, bn[+]sh"),
        ({"other": SCALES}, "'bn' has no other setting than beta"),
        ({"datasets": ("NATO",)}, "there is no set 'NATO' to classify"),
        ({"datasets": ("AppliancesEnergy",)}, "'AppliancesEnergy' to classify"),
        ({"values": (0.5, 0.5)}, "two different values"),
        ({"changes": {"validation": 0.0}}, "the test set never chooses"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(BETA, **changes)


def test_the_plot_is_a_picture():
    pytest.importorskip("matplotlib")
    from primaldual.paper.sweep_plot import sweep_plot

    wide = replace(BETA, setting="scales", mechanism="sh", values=VALUES["scales"])
    for sweep in (BETA, replace(BETA, datasets=("NATOPS",)), wide):
        made = sweep_plot(swept(sweep, records(sweep)))
        assert made is not None and made.startswith(b"\x89PNG")
    assert sweep_plot(swept(BETA, [])) is None


def test_a_sweep_of_sparse_attention_has_the_stride_of_the_table():
    tried = Sweep("beta", "sparse-bn", (0.0, 0.3), ("Handwriting",)).jobs()
    assert len(tried) == 2 and {run.primal.training_set.pattern for run in tried} == {Strided(None)}
