"""A tiny demo from end to end, and the parts that its numbers rest on."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from rich.console import Console

from primaldual.data import load
from primaldual.demo import DemoError, Settings, run_demo
from primaldual.demo import checks as checks_module
from primaldual.demo.figures import Figures
from primaldual.demo.members import train_members
from primaldual.demo.output import FILES, check_folder, write_all
from primaldual.demo.run import _Trainer
from primaldual.demo.settings import NAMES, PAPER, TRAINING, family

RECIPE = TRAINING.having(layers=1, d_model=16, feedforward=16)
TINY = Settings(seeds=2, epochs=2, sweep=(1.0,), sweep_seeds=1, budget=float("inf"), training=RECIPE)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRIMALDUAL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def data():
    return load("BasicMotions", offline=True)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "out"
    threads = torch.get_num_threads()
    results = run_demo(folder, TINY, console=Console(quiet=True))
    assert torch.get_num_threads() == threads
    return folder, results


def test_settings_and_numbers_are_the_papers():
    assert PAPER["bn+sh"] == (99.78, 0.51)
    assert family()["bn+sh"].inputs[0].beta == 0.1
    assert family()["sh"].training_set.scales == (1, 1, 2, 2, 4, 4, 8, 8)


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
    assert record["data"]["sha256"] == demo[1].data.hash
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
    assert [member.seed for members in grouped.values() for member in members] == [0, 0, 0]
    assert grouped[0.0][0].mechanism == "softmax"


def test_heads_png_is_small_enough_for_a_readme(demo):
    picture = (demo[0] / "heads.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) <= 200_000


def test_without_time_one_seed_of_each_is_trained_and_the_report_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("primaldual.demo.figures.draw", lambda results: Figures(*[b""] * 4, None, b""))
    results = run_demo(tmp_path / "out", replace(TINY, epochs=1, budget=1e-3), console=Console(quiet=True))
    assert [(member.mechanism, member.seed) for member in results.members] == [(name, 0) for name in NAMES]
    assert results.sweep == []
    assert any("1 of 2 seeds" in note for note in results.notes)
    html = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "The sweep over β was left out" in html


def test_as_many_seeds_are_trained_as_there_is_time_for(monkeypatch):
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    trainer = _Trainer(None, RECIPE, 100.0 + 10.0, None)
    trainer.seconds, trainer.members = 2.0, 4  # half a second each: in three quarters of 10 s there is time for 15
    assert trainer.seeds_in_time(4, 4) == 3
    assert trainer.seeds_in_time(3, 4) == 3
    assert trainer.seeds_in_time(2, 4) == 2
    trainer.end = 90.0
    assert trainer.seeds_in_time(2, 4) == 0


def test_a_member_has_its_share_of_the_time_and_the_maps_of_a_series_that_is_shown(data, monkeypatch):
    monkeypatch.setattr("primaldual.demo.members._maps", lambda model, series: series)
    monkeypatch.setattr("time.process_time", iter([1.0, 5.0]).__next__)
    found = train_members("bn", family()["bn"], data, RECIPE, range(2), lambda report: None)
    walking = data.test.x[data.test.y == data.classes.index("walking")]
    for member in found:
        assert torch.equal(member.maps, walking[0]) and member.seconds == 2.0 and member.head_distance > 0


def test_a_mechanism_that_disagrees_with_its_reference_stops_the_demo(data, monkeypatch):
    right = checks_module._outcome

    def wrong(layer, impl, inputs, padding, probe):
        return [x + (1e-6 if impl == "auto" else 0) for x in right(layer, impl, inputs, padding, probe)]

    monkeypatch.setattr(checks_module, "_outcome", wrong)
    with pytest.raises(DemoError, match="bn differs from its reference"):
        checks_module.check("bn", family()["bn"], data, RECIPE)


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
