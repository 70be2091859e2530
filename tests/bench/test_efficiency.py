"""What scaled heads save is counted as torch counts it, and kept and allocated as torch keeps and allocates it."""

import json
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from primaldual.bench.efficiency import BASELINES, MECHANISMS, Setting
from primaldual.bench.efficiency import measure as measuring
from primaldual.bench.efficiency.figures import figures
from primaldual.bench.efficiency.flops import flops
from primaldual.bench.efficiency.measure import Cell, EfficiencyBench, cells
from primaldual.bench.efficiency.memory import Weights, peak
from primaldual.bench.efficiency.setting import STEPS
from primaldual.bench.efficiency.speed import random_pairs
from primaldual.bench.efficiency.stated import PAPER, POINT, summary
from primaldual.bench.efficiency.step import ModelStep, counted_by_torch
from primaldual.bench.efficiency.table import errors, tables
from primaldual.bench.efficiency.tensors import Tensors
from primaldual.primal import mechanism

CPU = torch.device("cpu")
SMALL = Setting(32, 128, device="cpu")
LONG = Setting(16, 512, device="cpu", in_turn=False)
H200 = {"environment": {"device": "NVIDIA H200"}}


def kept_by_torch(name: str, setting: Setting) -> int:
    """Bytes of the memory that autograd holds on to in a step, but for weights and tokens; each counted once."""
    step = ModelStep(name, setting, CPU)
    own = {x.untyped_storage().data_ptr() for x in (*step.model.parameters(), step.tokens)}
    found = {}

    def pack(x):
        memory = x.untyped_storage()
        found[memory.data_ptr()] = memory, memory.nbytes()  # held, so that no other takes its place
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        step._scores()
    return sum(size for place, (_, size) in found.items() if place not in own)


@pytest.mark.parametrize("length", [64, 65])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", MECHANISMS)
def test_torch_counts_as_many_flops_of_products(name, step, length):
    setting = Setting(16, length, 3, step)
    assert counted_by_torch(name, setting) == flops(name, setting).products


@pytest.mark.parametrize("name", MECHANISMS)
def test_beside_products_there_is_what_pools_and_recentres(name):
    setting = Setting(64, 4096, step="inference")
    found = flops(name, setting)
    assert (found.maps > 0) == (name in BASELINES)
    assert found.total - found.products == found.maps < 2e-3 * found.total


def test_a_fused_backward_pass_takes_as_much_as_torch_says():
    shape = (2, 2, 64, 8)
    forward = sdpa_flop_count(shape, shape, shape)
    found = {step: flops("softmax", Setting(16, 64, step=step, attention="fused")) for step in STEPS}
    assert found["inference"].attention == 2 * forward  # layers
    assert found["training"].attention == 2 * (forward + sdpa_backward_flop_count(shape, shape, shape, shape))


@pytest.mark.parametrize("name", ["sparse", "sparse-sh"])
def test_a_fused_sparse_attention_is_counted_by_its_pattern(name):
    setting = Setting(16, 100, step="inference", attention="fused")
    pairs = sum(int(mechanism(name).training_set.visible(g.scale, 100, 100, CPU).sum()) * g.heads
                for g in Tensors(name, setting).groups)  # fmt: skip
    assert flops(name, setting).attention == 2 * 2 * 4 * 8 * pairs  # layers, documents, 4D


@pytest.mark.parametrize("in_turn", [True, False], ids=["in turn", "at once"])
@pytest.mark.parametrize("pairs", [1, 2])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", MECHANISMS)
def test_autograd_keeps_what_is_counted_to_the_byte(name, dropout, pairs, in_turn):
    setting = replace(SMALL, dropout=dropout, pairs=pairs, in_turn=in_turn)
    assert kept_by_torch(name, setting) == Tensors(name, setting).kept


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_autograd_keeps_what_is_counted_of_a_fused_attention(dropout):
    setting = replace(SMALL, attention="fused", dropout=dropout, pairs=2)
    assert kept_by_torch("softmax", setting) == Tensors("softmax", setting).kept


def test_without_kernels_for_it_scaled_heads_keep_pooled_inputs_and_their_outputs_beside():
    setting = replace(SMALL, length=512, attention="fused")
    counted = Tensors("sh", setting)
    pooled = counted.pooled_inputs(counted.groups[1])
    assert kept_by_torch("sh", setting) - counted.kept == 2 * (pooled + counted.stream)  # layers


@pytest.mark.parametrize("setting", [SMALL, LONG], ids=["32 × 128", "16 × 512"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", MECHANISMS)
def test_as_much_is_allocated_as_is_counted(name, step, setting):
    setting = replace(setting, step=step, pairs=2)
    assert ModelStep(name, setting, CPU).peak() == pytest.approx(peak(name, setting).bytes, rel=0.03)


@pytest.mark.parametrize("step", STEPS)
def test_as_much_is_allocated_for_a_fused_attention(step):
    setting = replace(SMALL, attention="fused", step=step)
    assert ModelStep("softmax", setting, CPU).peak() == pytest.approx(peak("softmax", setting).bytes, rel=0.01)


@pytest.mark.parametrize("name", ["sh", "sparse"])
def test_more_memory_is_counted_for_what_an_optimiser_keeps(name):
    setting = Setting(64, 256)
    weights = sum(p.numel() for p in ModelStep(name, setting, torch.device("meta")).model.parameters())
    assert Weights.of(setting).total(setting.sizes.layers) == weights
    for step, copies in (("training", 2), ("inference", 3)):
        at = replace(setting, step=step)
        assert peak(name, replace(at, optimizer=True)).bytes - peak(name, at).bytes == copies * 4 * weights


def test_documents_one_after_the_other_are_scored_as_both_at_once():
    at_once = ModelStep("bn+sh", replace(SMALL, step="inference", in_turn=False), CPU)
    in_turn = ModelStep("bn+sh", replace(SMALL, step="inference"), CPU)
    in_turn.model, in_turn.tokens = at_once.model, at_once.tokens
    torch.testing.assert_close(in_turn(), at_once())


def test_what_is_timed_reads_documents_of_the_models_length():
    setting = Setting(16, 48, pairs=5, attention="fused")
    data = random_pairs(setting)
    assert data.pairs and set(data.documents.lengths) == {48} and data.vocabulary == 257
    assert len(data.parts["train"]) % setting.pairs == 0


def test_the_papers_point_follows():
    """FLOPs, and memory of training, within half a point to a point; of inference with what a training run holds."""
    found = {}
    for step in STEPS:
        at = Setting(*POINT, step=step)
        found["flops", step] = flops("bn+sh", at).total / flops("softmax", at).total - 1
        held = replace(at, optimizer=True)
        found["bytes", step] = peak("bn+sh", held).bytes / peak("softmax", held).bytes - 1
    for (name, figure, step), said in PAPER.items():
        assert name == "bn+sh" and found[figure, step] == pytest.approx(said, abs=0.012), (figure, step)


@pytest.mark.parametrize("figure", ["flops", "bytes"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", BASELINES)
def test_more_is_saved_of_longer_documents_and_less_by_wider_models(name, step, figure):
    def ratio(dimension, length):
        setting = Setting(dimension, length, step=step)
        of = {"flops": lambda n: flops(n, setting).total, "bytes": lambda n: peak(n, setting).bytes}[figure]
        return of(name) / of(BASELINES[name])

    lengths, dimensions = (512, 1024, 2048), (64, 128, 256)
    along = [ratio(128, length) for length in lengths]
    across = [ratio(dimension, 1024) for dimension in dimensions]
    assert along == sorted(along, reverse=True) and across == sorted(across)


def test_a_fused_attention_leaves_little_memory_to_save():
    for step in STEPS:
        setting = Setting(*POINT, step=step, attention="fused")
        assert 0.96 < peak("sh", setting).bytes / peak("softmax", setting).bytes <= 1.0


def measured(grid: list[Cell]) -> dict:
    """A content, as a run on a CPU makes it."""
    bench = EfficiencyBench(CPU, repeats=3, budget=0.0)
    content = H200 | {"records": [bench.measure(cell) for cell in grid]}
    return content | summary(content)


def test_a_grid_is_counted_and_measured_and_shown(monkeypatch):
    monkeypatch.setitem(measuring.TOKENS, "cpu", 1)
    content = measured(cells((8,), (32,), (8,), pairs=1, device="cpu"))
    assert json.loads(json.dumps(content, allow_nan=False)) == content and not errors(content)
    subjects = [r["subject"] for r in content["records"]]
    assert subjects == ["cost"] * 4 + ["speed"] * 2
    for record in content["records"]:
        for found in record["mechanisms"].values():
            if record["subject"] == "speed":
                assert 0 < found["seconds_min"] <= found["seconds"] <= found["seconds_max"]
                assert found["tokens_per_second"] == round(2 * record["length"] / found["seconds"])
            else:
                assert found["bytes"] > 0 < found["measured_bytes"]
                assert ("measured_flops" in found) == (record["attention"] == "materialised")
    assert content["stated"]["dimension"] == 8 and content["stated"]["length"] == 32
    row = content["stated"]["rows"][0]
    assert "paper" not in row and row["materialised_measured"] == pytest.approx(row["materialised_counted"], abs=0.01)
    assert [table.row_count for table in tables(content)] == [16, 6, 6, 6]
    drawn = figures(content)
    assert set(drawn) == {*BASELINES, "speed"} and all(png.startswith(b"\x89PNG") for png in drawn.values())


def test_what_is_only_counted_needs_no_device():
    content = measured(cells((64,), (4096,), (64,), pairs=1, device="cuda", counted_only=True))
    assert all("measured_bytes" not in f for r in content["records"] for f in r["mechanisms"].values())
    papers = [row["paper"] for row in content["stated"]["rows"] if row["mechanism"] == "bn+sh"]
    assert papers == [-0.25, -0.25, -0.319, -0.473]
    assert [r["dtype"] for r in content["records"]] == ["float32", "float32", "bfloat16", "bfloat16"]


def test_a_mechanism_that_cannot_be_measured_is_an_error_beside_the_others(monkeypatch):
    right = ModelStep.__init__

    def refusing(self, name, setting, device):
        if name == "sh" and device == CPU:
            raise torch.OutOfMemoryError("CUDA out of memory")
        right(self, name, setting, device)

    monkeypatch.setattr(ModelStep, "__init__", refusing)
    setting = Setting(8, 16, device="cpu")
    timed = replace(setting, step="inference", attention="fused")
    content = measured([Cell("cost", setting, True), Cell("speed", timed, True)])
    assert len(errors(content)) == 2 and all("sh: out of memory" in line for line in errors(content))
    cost, speed = (r["mechanisms"] for r in content["records"])
    assert cost["sh"]["bytes"] > 0 and "measured_bytes" in cost["bn+sh"] and "seconds" in speed["softmax"]
    assert tables(content)


@pytest.mark.gpu
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", MECHANISMS)
def test_a_gpu_allocates_as_much_as_is_counted(name, step):
    setting = Setting(64, 2048, step=step)
    found = ModelStep(name, setting, torch.device("cuda")).peak()
    assert found == pytest.approx(peak(name, setting).bytes, rel=0.03), peak(name, setting).at


@pytest.mark.gpu
@pytest.mark.parametrize("step", STEPS)
def test_a_gpu_times_every_mechanism(step):
    bench = EfficiencyBench(torch.device("cuda"), repeats=3, budget=0.5)
    content = H200 | {"records": [bench.measure(Cell("speed", Setting(64, 512, 2, step, "fused"), True))]}
    assert not errors(content)
