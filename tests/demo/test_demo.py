"""A tiny demo from end to end, and the parts that its numbers rest on."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from rich.console import Console

from primaldual import mechanism
from primaldual.demo import DemoError, Recipe, run_demo
from primaldual.demo import checks as checks_module
from primaldual.demo.data import load
from primaldual.demo.heads import head_maps
from primaldual.demo.output import FILES, check_folder, write_all
from primaldual.demo.pool import Pool
from primaldual.demo.recipe import family
from primaldual.demo.train import Job, build, train

TINY = Recipe(seeds=2, epochs=2, sweep=(1.0,), sweep_seeds=1, workers=1, budget=float("inf"), layers=1)
NAMES = ("softmax", "bn", "sh", "bn+sh")


@pytest.fixture(scope="module")
def data():
    return load()


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "out"
    threads = torch.get_num_threads()
    results = run_demo(folder, TINY, console=Console(quiet=True))
    assert torch.get_num_threads() == threads
    return folder, results


def test_data_is_the_archives_split_standardised_by_training_statistics(data):
    assert data.train.shape == data.test.shape == (40, 100, 6)
    assert data.classes == ("badminton", "running", "standing", "walking")
    assert torch.bincount(data.train_labels).tolist() == [10, 10, 10, 10]
    torch.testing.assert_close(data.train.mean((0, 1)), torch.zeros(6), atol=1e-5, rtol=0)
    torch.testing.assert_close(data.train.std((0, 1)), torch.ones(6), atol=1e-3, rtol=0)
    assert data.test.mean((0, 1)).abs().max() > 1e-3  # the test set has its own mean


def test_the_folder_holds_the_three_files_and_nothing_else(demo):
    assert sorted(path.name for path in demo[0].iterdir()) == sorted(FILES)


class Loads(HTMLParser):
    """Collects what a browser would fetch."""

    def __init__(self):
        super().__init__()
        self.fetched, self.images = [], 0

    def handle_starttag(self, tag, attrs):
        self.images += tag == "img"
        self.fetched += [v for k, v in attrs if k in ("src", "href", "srcset", "data") and not v.startswith("data:")]
        self.fetched += [tag] if tag in ("script", "link", "iframe") else []


def test_the_report_is_self_contained_and_names_every_mechanism(demo):
    html = (demo[0] / "report.html").read_text(encoding="utf-8")
    page = Loads()
    page.feed(html)
    assert page.fetched == []
    assert page.images == 5
    assert "@import" not in html and "url(" not in html
    for name in NAMES:
        assert f"<b>{name}</b>" in html and f"<summary>{name}</summary>" in html


def test_the_report_shows_the_measured_accuracies(demo):
    html = (demo[0] / "report.html").read_text(encoding="utf-8")
    for name in NAMES:
        assert demo[1].accuracy(name).text() in html


def test_the_records_hold_every_run(demo):
    record = json.loads((demo[0] / "results.json").read_text(encoding="utf-8"))
    assert [(r["mechanism"], r["seed"]) for r in record["runs"]] == [(n, s) for s in (0, 1) for n in NAMES]
    for run in record["runs"]:
        assert len(run["losses"]) == len(run["accuracies"]) == 2
        assert all(0.5 < loss < 2.5 for loss in run["losses"])  # near log 4: two epochs teach little
        assert all(a * 40 / 100 == round(a * 40 / 100) for a in run["accuracies"])  # of 40 test series
        assert run["seconds"] > 0 and run["head_distance"] > 0
    assert record["summary"]["sh"]["flops"]["after"] < record["summary"]["softmax"]["flops"]["after"]
    assert {check["mechanism"] for check in record["checks"]} == set(NAMES)
    assert all(check["output"] <= 1e-9 and check["gradient"] <= 1e-9 for check in record["checks"])
    assert [run["primal"]["inputs"][0]["beta"] for run in record["sweep"]] == [1.0]


def test_the_sweep_takes_softmax_as_beta_zero(demo):
    grouped = demo[1].by_beta()
    assert list(grouped) == [0.0, 0.1, 1.0]
    assert [run.seed for runs in grouped.values() for run in runs] == [0, 0, 0]
    assert grouped[0.0][0].mechanism == "softmax"


def test_heads_png_is_small_enough_for_a_readme(demo):
    picture = (demo[0] / "heads.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) <= 200_000


def test_the_budget_stops_after_whole_rounds_and_says_so(tmp_path):
    results = run_demo(tmp_path / "out", replace(TINY, epochs=1, budget=1e-3), console=Console(quiet=True))
    assert [run.mechanism for run in results.runs] == list(NAMES)
    assert results.sweep == []
    assert any("1 of 2 seeds" in note for note in results.notes)
    html = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "The sweep over β was left out" in html


def test_a_seed_gives_the_same_run_in_another_process(data):
    jobs = [Job("bn+sh", family()["bn+sh"], 3), Job("softmax", mechanism("softmax"), 3)]
    recipe = replace(TINY, epochs=1)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        here = [train(job, data, recipe) for job in jobs]
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.get_rng_state(), state)
    with Pool(data, replace(recipe, workers=2)) as pool:
        there = pool.rounds([jobs], lambda: float("inf"), lambda: None)
    for a, b in zip(here, there, strict=True):
        assert (a.mechanism, a.seed, a.losses, a.accuracies) == (b.mechanism, b.seed, b.losses, b.accuracies)
        assert torch.equal(a.maps, b.maps)


def test_all_mechanisms_start_from_the_same_weights(data):
    first, *others = (build(primal, data, TINY, seed=1).state_dict() for primal in family().values())
    for other in others:
        assert first.keys() == other.keys()
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_training_learns(data):
    run = train(Job("bn", family()["bn"], 0), data, replace(TINY, epochs=10))
    assert run.losses[-1] < 0.6 * run.losses[0]
    assert run.accuracy > 50  # chance is 25


def test_maps_are_those_that_the_model_uses(data):
    """Rows sum to one, and the maps applied to the values give the layer's output."""
    model = build(family()["bn+sh"], data, TINY, seed=0).eval()
    (maps,) = head_maps(model, data.test[:2])
    torch.testing.assert_close(maps.sum(-1), torch.ones(2, 8, 100))
    layer = model.encoder_layers()[0].self_attn
    x = model.embed(data.test[:2])
    values = torch.nn.functional.linear(x, *layer.weights_of("v")).unflatten(-1, (8, 8)).transpose(1, 2)
    output = layer.out_proj((maps @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(output, layer(x, x, x, need_weights=False)[0], atol=1e-4, rtol=1e-4)


def test_a_mechanism_that_disagrees_with_its_reference_stops_the_demo(data, monkeypatch):
    right = checks_module._outcome

    def wrong(layer, impl, inputs, padding, probe):
        return [x + (1e-6 if impl == "auto" else 0) for x in right(layer, impl, inputs, padding, probe)]

    monkeypatch.setattr(checks_module, "_outcome", wrong)
    with pytest.raises(DemoError, match="bn differs from its reference"):
        checks_module.check("bn", family()["bn"], data, TINY)


def test_an_earlier_demo_is_replaced_but_nothing_else(demo, tmp_path):
    check_folder(demo[0], force=False)
    (tmp_path / "results.json").write_text('{"what": "my own results"}')
    with pytest.raises(DemoError, match=re.escape("--force")):
        check_folder(tmp_path, force=False)
    check_folder(tmp_path, force=True)
    file = tmp_path / "results.json"
    with pytest.raises(DemoError, match="is a file"):
        check_folder(file, force=True)


def test_a_write_that_fails_leaves_the_old_file_and_no_debris(tmp_path):
    write_all(tmp_path, {"report.html": b"old"})
    with pytest.raises(TypeError):
        write_all(tmp_path, {"report.html": "text, where bytes are needed"})
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_bytes() == b"old"
