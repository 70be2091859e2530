"""Reports from records that no training made."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paper.records import record
from primaldual.paper import Failure, Outcome, compare, jobs, recorded
from primaldual.training import Store

RESULTS = Path(__file__).parents[2] / "results" / "h200"

SOFTMAX, BN = jobs("table-uea", ["JapaneseVowels"], ["softmax", "bn"], range(2))


def two_seeds():
    return [
        record(SOFTMAX, 0, [97.0, 99.0, 98.0]), record(SOFTMAX, 1, [97.0, 98.0]),
        record(BN, 0, [99.5, 97.5]), record(BN, 1, [96.0, 98.0]),
    ]  # fmt: skip


def of(records, **options):
    part = {"only": ["JapaneseVowels"], "mechanisms": ["softmax", "bn"], "seeds": range(2)}
    return compare("table-uea", records, **part | options)


def test_the_markdown_is_exactly_this():
    text = of(two_seeds()).markdown()
    assert (
        text.partition("\n- paper:")[0]
        == """\
# table-uea: UEA classification, accuracy in %

| set |  | softmax | bn |
| :-- | :-- | --: | --: |
| JapaneseVowels | paper | 99.46 ± 0.27 | 99.55 ± 0.31 |
|  | best | 98.50 ± 0.71 | 98.75 ± 1.06 |
|  | last | 98.00 ± 0.00 | 97.75 ± 0.35 |
| Average of 1 | paper | 99.46 | 99.55 |
|  | best | 98.50 | 98.75 |
|  | last | 98.00 | 97.75 |

## against softmax: wins / ties / losses (p)

| pairs |  | bn |
| :-- | :-- | --: |
| sets | paper | 1 / 0 / 0 (1) |
|  | best | 1 / 0 / 0 (1) |
|  | last | 0 / 0 / 1 (1) |
| seeds | best | 1 / 1 / 0 (1) |
|  | last | 0 / 1 / 1 (1) |
"""
    )


def test_the_csv_is_exactly_this():
    assert (
        of(two_seeds()).csv()
        == """\
set,mechanism,kind,seeds,failed,mean,std,paper_mean,paper_std,wins,ties,losses,p
JapaneseVowels,softmax,best,2,0,98.5,0.707107,99.46,0.27,,,,
JapaneseVowels,softmax,last,2,0,98,0,99.46,0.27,,,,
JapaneseVowels,bn,best,2,0,98.75,1.06066,99.55,0.31,1,1,0,1
JapaneseVowels,bn,last,2,0,97.75,0.353553,99.55,0.31,0,1,1,1
"all, by set",softmax,best,,,98.5,,99.46,,,,,
"all, by seed",softmax,best,,,98.5,,99.46,,,,,
"all, by set",softmax,last,,,98,,99.46,,,,,
"all, by seed",softmax,last,,,98,,99.46,,,,,
"all, by set",bn,best,,,98.75,,99.55,,1,0,0,1
"all, by seed",bn,best,,,98.75,,99.55,,1,1,0,1
"all, by set",bn,last,,,97.75,,99.55,,0,0,1,1
"all, by seed",bn,last,,,97.75,,99.55,,0,1,1,1
"""
    )


def test_the_latex_is_exactly_this():
    text = of(two_seeds()).latex()
    assert (
        text.partition("\n\n%")[0]
        == r"""% table-uea: UEA classification, accuracy in %
\begin{tabular}{llrr}
\toprule
set &  & softmax & bn \\
\midrule
JapaneseVowels & paper & 99.46 $\pm$ 0.27 & 99.55 $\pm$ 0.31 \\
 & best & 98.50 $\pm$ 0.71 & 98.75 $\pm$ 1.06 \\
 & last & 98.00 $\pm$ 0.00 & 97.75 $\pm$ 0.35 \\
\addlinespace
Average of 1 & paper & 99.46 & 99.55 \\
 & best & 98.50 & 98.75 \\
 & last & 98.00 & 97.75 \\
\bottomrule
\end{tabular}"""
    )


def test_a_failed_member_is_shown_and_counts_neither_as_best_nor_as_last():
    records = [*two_seeds()[:3], record(BN, 1, [99.9], failure="the loss is not finite in epoch 2")]
    found = of(records)
    assert found.cells["JapaneseVowels", "bn"].best == {0: 99.5}
    assert found.notes == ("failed: JapaneseVowels, bn, seed 1: the loss is not finite in epoch 2",)
    assert "| 99.50 (1 of 2) |" in found.markdown() and found.notes[0] in found.latex()
    assert [row["failed"] for row in csv.DictReader(found.csv().splitlines())][2:4] == ["1", "1"]


def test_what_is_missing_is_listed():
    found = of(two_seeds()[:3], only=["JapaneseVowels", "PEMS-SF", "Heartbeat"],
               failures=[Failure("PEMS-SF", None, "there is no such file")])  # fmt: skip
    assert found.notes == (
        "not run: JapaneseVowels, bn, seeds 1",
        "missing set PEMS-SF: there is no such file",
        "missing set Heartbeat: no run of it is recorded",
    )
    assert "| PEMS-SF | paper | 82.66 ± 0.51 | 84.77 ± 0.33 |\n|  | best | – | – |" in found.markdown()
    assert found.averaged == ("JapaneseVowels",)


def test_records_of_another_recipe_or_beta_are_left_aside():
    short = jobs("table-uea", ["JapaneseVowels"], ["bn"], range(2), epochs=3)[0]
    other = jobs("table-uea", ["PEMS-SF"], ["bn"], range(2))[0]
    earlier = replace(record(BN, 0, [1.0]), version=0)
    assert recorded([BN], [earlier, record(BN, 7, [1.0])]) == {BN: {}}  # of another version, of another seed
    assert short != BN and recorded([BN], [record(short, 0, [1.0]), record(other, 0, [1.0])]) == {BN: {}}
    found = of([record(short, 0, [1.0, 2.0]), *two_seeds()], epochs=3)
    assert found.cells["JapaneseVowels", "bn"].last == {0: 2.0}
    assert found.notes[0] == "NOT the paper's recipe: epochs 3 instead of 400"


def test_records_of_different_files_of_a_set_are_not_mixed():
    with pytest.raises(ValueError, match="two records from different files"):
        of([*two_seeds(), record(BN, 0, [90.0], data="other")])
    with pytest.raises(ValueError, match="different files of the set"):
        of([*two_seeds()[:2], record(BN, 0, [90.0], data="other")])


def test_a_lower_error_wins():
    softmax, bn = jobs("table-regression", ["IEEEPPG"], ["softmax", "bn"], [0])
    found = compare("table-regression", [record(softmax, 0, [30.0, 33.0]), record(bn, 0, [31.0, 32.0])],
                   ["IEEEPPG"], ["softmax", "bn"], [0])  # fmt: skip
    assert found.by_seed("bn", "best") == Outcome(0, 0, 1) and found.by_seed("bn", "last") == Outcome(1, 0, 0)
    assert found.by_set("bn", "paper") == Outcome(1, 0, 0)


def test_as_many_right_is_a_tie_however_float32_rounds_the_seeds():
    percent = [(np.float32(right) / np.float32(370) * 100).item() for right in (361, 361, 370, 352)]
    records = [record(job, seed, [percent[2 * i + seed]]) for i, job in enumerate((SOFTMAX, BN)) for seed in range(2)]
    assert sum(percent[:2]) != sum(percent[2:]) and of(records).by_set("bn", "last") == Outcome(0, 1, 0)


def test_without_the_baseline_nothing_is_compared():
    found = of(two_seeds(), mechanisms=["bn", "qk-norm"])
    assert len(found.grids()) == 1 and not any(found.by_seed("bn", "best"))


def test_the_sign_test_is_the_binomial_s():
    scipy_stats = pytest.importorskip("scipy.stats")
    for wins, losses in ((0, 5), (3, 4), (13, 2), (40, 25)):
        assert Outcome(wins, 7, losses).p == pytest.approx(scipy_stats.binomtest(wins, wins + losses).pvalue)
    assert Outcome(0, 3, 0).p is None


@pytest.mark.deep
def test_the_committed_table_is_made_of_the_committed_records():
    mechanisms = ["softmax", "bn", "sh", "bn+sh", "qk-norm"]
    found = compare("table-uea", Store(RESULTS / "runs").records(), mechanisms=mechanisms, dtype="bfloat16")
    assert found.markdown() == (RESULTS / "tables" / "table-uea.md").read_text("utf-8")
    assert found.csv() == (RESULTS / "tables" / "table-uea.csv").read_text("utf-8")
