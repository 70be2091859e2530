"""`primaldual certify` prints what was measured, and its exit status says whether it holds."""

import json
import re

import pytest
from typer.testing import CliRunner, Result

import primaldual
from primaldual.cli import app
from primaldual.regression import drawn
from primaldual.regression.claims import certify


def call(*arguments: str, columns: int = 160) -> Result:
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["certify", *arguments])


def one_line(result: Result) -> str:
    (line,) = result.stderr.strip().splitlines()
    return line


def rows(result: Result) -> dict[str, list[str]]:
    """The cells of each line by the first one."""
    cells = (re.split(r"\s{2,}", line.strip()) for line in result.stdout.splitlines() if line.strip())
    return {first: rest for first, *rest in cells}


def test_one_mechanism_gets_a_line_per_check():
    result = call("linear")
    assert result.exit_code == 0, result.output
    table = rows(result)
    for check in certify("linear").checks:
        assert check.name in table
    assert table["duality gap"][1:] == ["1e-08", "ok"]
    assert table["recovery, α"] == ["–", "1e-06", "skipped", "α is not unique"]
    assert "certified: linear" in table


def test_what_is_skipped_or_sampled_is_said():
    out = call("sparse-bn").stdout
    assert "no finite Φ" in out and "queries 0, 24, 47" in out
    assert "length 25, not 24" in call("conv2d").stdout


def test_all_gets_a_line_per_mechanism_in_eighty_columns():
    result = call("--all", columns=80)
    assert result.exit_code == 0, result.output
    table = rows(result)
    for name in primaldual.mechanisms():
        assert len(table[name]) == 7 and table[name][-1] == "ok"
    assert (table["softmax"][2], table["linear"][5]) == ("–", "–")
    assert result.stdout.splitlines()[-1] == f"certified: all {len(primaldual.mechanisms())} mechanisms"


def test_options_reach_the_problem_and_json_says_what_was_measured():
    options = ("--length", "10", "--head-dim", "4", "--seed", "2", "--heads", "2", "--values", "1")
    result = call("sh", *options, "--epsilon", "0.2", "--bias", "--json")
    wanted = certify("sh", length=10, head_dim=4, seed=2, heads=2, values=1, epsilon=0.2, bias=True)
    assert json.loads(result.stdout) == json.loads(json.dumps(wanted.to_dict()))


def test_json_of_the_defaults_is_strict_and_complete():
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    alone = json.loads(call("linear", "--json").stdout, parse_constant=refuse)
    assert alone == json.loads(json.dumps(certify("linear").to_dict()))
    everything = json.loads(call("--all", "--json").stdout, parse_constant=refuse)
    assert everything["ok"] is True
    assert [one["mechanism"] for one in everything["certifications"]] == list(primaldual.mechanisms())


@pytest.mark.parametrize("arguments", [("softmax",), ("--all",), ("softmax", "--json"), ("--all", "--json")])
def test_a_failure_is_named_and_sets_the_exit_status(monkeypatch, arguments):
    right = drawn.attention

    def wrong(q, k, v, primal, **given):
        out = right(q, k, v, primal, **given)
        return out * 1.001 if primal == primaldual.mechanism("softmax") else out

    monkeypatch.setattr(drawn, "attention", wrong)
    result = call(*arguments)
    assert result.exit_code == 1
    if "--json" in arguments:
        assert json.loads(result.stdout)["ok"] is False
    else:
        assert "FAILED softmax: by attention vs by α is 1.0e-03, tolerance 1e-08" in result.stdout
        count = len(primaldual.mechanisms()) if "--all" in arguments else 1
        assert f"{count - 1} of {count} certified" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("softmx",), "did you mean 'softmax'"),
        ((), "NAME of a mechanism, or --all"),
        (("softmax", "--all"), "NAME of a mechanism, or --all"),
        (("softmax", "--epsilon", "-1"), "epsilon"),
        (("softmax", "--epsilon", "nan"), "epsilon"),
    ],
)
def test_bad_arguments_fail_in_one_line(arguments, said):
    result = call(*arguments)
    assert result.exit_code == 2
    assert said in one_line(result)
    assert result.stdout == ""


def test_help_shows_examples():
    plain = re.sub(r"\x1b\[[0-9;]*m", "", call("--help").stdout)
    assert "primaldual certify bn+sh" in plain and "primaldual certify --all" in plain
