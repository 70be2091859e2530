"""What is counted, measured and written; never how long anything takes."""

import json
import math
from dataclasses import asdict

import pytest
import torch

from primaldual import MultiheadAttention, attention, mechanism
from primaldual.bench import PRESETS, TARGETS, AttentionBench, Case, grid
from primaldual.bench import kernels as kernels_module
from primaldual.bench.ceilings import Ceilings
from primaldual.bench.counts import bytes_moved, flops
from primaldual.bench.plot import ratio_plot, targets_plot
from primaldual.bench.rotary import RotarySoftmax
from primaldual.bench.session import measure_all
from primaldual.bench.table import preset_tables
from primaldual.bench.targets import cases, verdicts
from primaldual.bench.timing import Contestant, Timed, in_turns, working_bytes
from primaldual.training.capture import step_graph

CPU = torch.device("cpu")
SMALL = Case("kernels", "sh", 16, 2, heads=4, head_dim=8, dtype="float32", mode="eager", scales=(1, 1, 2, 2))
CEILINGS = Ceilings(1e9, {"float32": 1e10})


def other(case, **changes):
    return Case(**({f: getattr(case, f) for f in case.__dataclass_fields__} | changes))


def test_attention_counts_its_pairs():
    one = Case("kernels", "softmax", 128, 3, heads=2, head_dim=16, step="forward")
    assert flops(one) == 3 * 2 * 4 * 128 * 128 * 16
    assert flops(other(one, step="forward+backward")) == 3.5 * flops(one)
    assert flops(other(one, causal=True)) == flops(one) * 129 / 256


def test_pooled_heads_take_their_share_of_the_arithmetic():
    one = Case("kernels", "sh", 1024, 1, scales=(1, 1, 2, 2, 4, 4, 8, 8))
    assert flops(one) / flops(one.softmax) == pytest.approx((1 + 1 / 2 + 1 / 4 + 1 / 8) / 4)


def test_a_pattern_too_long_to_count_has_no_flops():
    assert flops(Case("kernels", "sparse", 65536, 1)) is None


def test_a_layer_projects_four_times():
    one = Case("layers", "softmax", 32, 1, heads=2, head_dim=8, step="forward")
    assert flops(one) == flops(other(one, subject="kernels")) + 4 * 2 * 32 * 16 * 16


def test_bytes_are_those_of_inputs_and_outputs_once():
    one = Case("kernels", "bn", 128, 3, heads=2, head_dim=16, step="forward")
    tensor = 3 * 2 * 128 * 16 * 2
    assert bytes_moved(one) == 4 * tensor
    assert bytes_moved(other(one, step="forward+backward")) == 12 * tensor


def test_a_grid_has_about_the_same_tokens_at_every_length():
    made = grid("kernels", mechanisms=("bn",), lengths=(128, 65536), head_dims=(64,), dtypes=("bfloat16",),
                modes=("eager",), tokens=32768)  # fmt: skip
    assert {(case.length, case.batch) for case in made} == {(128, 256), (65536, 1)}
    assert {case.step for case in made} == {"forward", "forward+backward"}


@pytest.mark.parametrize("subject", ["kernels", "layers"])
@pytest.mark.parametrize("step", ["forward", "forward+backward"])
def test_a_record_says_what_was_measured(subject, step):
    bench = AttentionBench(CPU, repeats=3)
    bench.ceilings = CEILINGS
    case = other(SMALL, subject=subject, step=step)
    record = bench.measure(case)
    assert record["error"] is None, record["error"]
    assert record["repeats"] == 3
    for name in ("seconds", "rival_seconds", "ratio"):
        assert 0 < record[f"{name}_min"] <= record[name] <= record[f"{name}_max"]
    assert record["flops_share"] > 0 and record["bytes_share"] > 0
    assert record["rival"] == {"kernels": "sdpa", "layers": "default"}[subject]
    assert json.loads(json.dumps(record, allow_nan=False)) == record | {"scales": list(case.scales)}


def test_steps_give_the_gradients_of_attention():
    workload = kernels_module.workload(SMALL, CPU)
    found = workload.ours.steps[0]()
    step = workload.ours.steps[0]
    _, (q, k, v), up, _ = step.args
    wanted = torch.autograd.grad(attention(q, k, v, SMALL.primal), (q, k, v), up)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mechanism": "conv2d"}, "not a square"),
        ({"mechanism": "linear", "impl": "sdpa"}, "impl='sdpa' cannot compute this"),
        ({"mechanism": "conv2d", "causal": True, "length": 9}, "is_causal=True"),
        ({"scales": (1, 2, 4)}, "scales"),
        ({"impl": "reference", "length": 2**17}, "the dense formula takes about"),
    ],
)
def test_a_refused_case_becomes_a_record_that_says_why(changes, said):
    record = AttentionBench(CPU, repeats=3).measure(other(SMALL, **({"length": 15} | changes)))
    assert said in record["error"]
    assert "seconds" not in record


def test_running_out_of_memory_becomes_a_record(monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory, in /home/me/lib.so")

    monkeypatch.setattr(kernels_module, "attention", full)
    assert AttentionBench(CPU, repeats=3).measure(SMALL)["error"] == "out of memory"


def test_without_a_fused_rival_there_is_time_but_no_ratio(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("No available kernel")

    monkeypatch.setattr(kernels_module, "scaled_dot_product_attention", refuse)
    record = AttentionBench(CPU, repeats=3).measure(other(SMALL, step="forward"))
    assert record["rival"] is None and "ratio" not in record and record["seconds"] > 0
    assert record["rivals"] == {"sdpa": "RuntimeError: No available kernel"}


def test_contestants_run_in_turns_and_each_step_in_its_turn():
    log = []
    pair = [Contestant(name, [lambda n=name + i: log.append(n) for i in "xy"], 0) for name in "ab"]
    timed = [Timed(one, "eager", CPU) for one in pair]
    for one in timed:
        one.inner = 2
    log.clear()
    rounds = in_turns(timed, 2, budget=math.inf)
    assert [len(times) for times in rounds] == [2, 2]
    assert [set(log[i : i + 2]) for i in range(0, 8, 2)] == [{"ax", "ay"}, {"bx", "by"}, {"bx", "by"}, {"ax", "ay"}]


def test_a_spent_budget_leaves_three_rounds():
    timed = Timed(Contestant("a", [lambda: None], 0), "eager", CPU)
    assert len(in_turns([timed], 100, budget=0.0)) == 3


def test_interrupting_keeps_what_was_measured(tmp_path):
    def measure(case):
        if case.mechanism == "bn":
            raise KeyboardInterrupt
        return {"mechanism": case.mechanism}

    path = tmp_path / "deep" / "kernels.json"
    cases = [SMALL, other(SMALL, mechanism="bn"), SMALL]
    content = measure_all(cases, measure, path, {}, summary=lambda content: {"count": len(content["records"])})
    written = json.loads(path.read_text())
    assert written == content
    assert written["complete"] is False and written["count"] == 1
    assert [record["mechanism"] for record in written["records"]] == ["sh"]


@pytest.mark.parametrize(
    ("preset", "device", "count"),
    [("targets", "cuda", 26), ("targets", "cpu", 3), ("language", "cuda", 10), ("language", "cpu", 0)],
)
def test_a_target_is_named_once_and_its_dream_is_beyond_what_must_be_reached(preset, device, count):
    targets = PRESETS[preset][device]
    assert len({(target.case, target.figure) for target in targets}) == len(targets) == count
    for target in targets:
        if target.dream is not None:
            assert target.dream > target.must if target.at_least else target.dream < target.must


def test_verdicts_stand_beside_their_bounds():
    made = [(case, {"error": None, "ratio": 0.55, "bytes_share": 0.7}) for case in cases("cuda")]
    found = verdicts("cuda", made)["targets"]
    assert len(found) == len(TARGETS["cuda"])
    first, last = found[0], next(one for one in found if one["figure"] == "bytes_share")
    assert (first["value"], first["must"], first["met"], first["dreamt"]) == (0.55, 0.90, True, True)
    assert (last["met"], last["dreamt"]) == (True, False)
    assert not any(one["met"] for one in found if one["figure"] == "memory_ratio")  # it was not measured


def test_what_stands_beside_targets_has_tables_of_its_own():
    record = {"error": None, "ratio": 0.7, "ratio_min": 0.6, "ratio_max": 0.8, "seconds": 1e-3, "rival": "cudnn",
              "arithmetic_limit": 0.5}  # fmt: skip
    made = [(case, asdict(case) | record) for case in cases("cuda", "language")]
    content = {"records": [r for _, r in made]} | verdicts("cuda", made, "language")
    targets, beside = preset_tables(content)
    assert (targets.row_count, beside.row_count) == (10, 6)
    assert [one["met"] for one in content["targets"]].count(True) == 6  # 0.7 is within 0.75, 1 and 0.75


def test_the_rival_with_rotary_positions_is_softmax_with_them():
    x, rival = torch.randn(2, 20, 32), RotarySoftmax(4, 8, 20, dtype=torch.float32)
    ours = MultiheadAttention(32, 4, batch_first=True, mechanism=mechanism("softmax", rotary=True))
    (weight, bias), out = rival.in_proj.parameters(), rival.out_proj.state_dict()
    ours.load_state_dict({"in_proj_weight": weight, "in_proj_bias": bias}
                         | {f"out_proj.{name}": value for name, value in out.items()})  # fmt: skip
    wanted, _ = ours(x, x, x, is_causal=True, need_weights=False)
    torch.testing.assert_close(rival(x, x, x, is_causal=True)[0], wanted)


def test_plots_are_drawn_from_the_records():
    case, environment = SMALL, {"device": "a machine"}
    shape = {"mechanism": "sh", "heads": 8, "head_dim": 64, "dtype": "bfloat16", "step": "forward", "mode": "eager"}
    record = shape | {"subject": "kernels", "error": None, "ratio": 0.5, "ratio_min": 0.4, "ratio_max": 0.6,
                      "arithmetic_limit": 0.47, "length": case.length}  # fmt: skip
    refused = {"error": "out of memory"}
    slow = record | {"ratio": 30.0, "ratio_min": 20.0, "ratio_max": 40.0}
    assert ratio_plot({"records": [slow], "environment": environment}).startswith(b"\x89PNG")
    picture = ratio_plot({"records": [record, refused], "environment": environment})
    assert picture is not None and picture.startswith(b"\x89PNG")
    assert ratio_plot({"records": [refused], "environment": environment}) is None
    done = [(one, {"error": None, "ratio": 0.5, "mode": one.mode, "length": 1, "batch": 1}) for one in cases("cuda")]
    content = {"records": [r for _, r in done], "environment": environment} | verdicts("cuda", done)
    assert targets_plot(content).startswith(b"\x89PNG")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["softmax", "bn", "sh", "bn+sh", "linear"])
def test_a_captured_step_gives_the_gradients_of_an_eager_one(name):
    case = Case("kernels", name, 128, 2, dtype="float32", scales=(1, 1, 2, 2, 4, 4, 8, 8))
    step = kernels_module.workload(case, torch.device("cuda")).ours.steps[0]
    eager = [x.clone() for x in step()]
    captured = step_graph(step)
    for x in captured.result:
        x.fill_(math.nan)
    captured.graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(captured.result, eager, strict=True):  # atomic additions come in any order
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "captured"])
@pytest.mark.parametrize("subject", ["kernels", "layers"])
def test_a_gpu_record_has_memory_and_names_the_back_end(subject, mode):
    case = Case(subject, "bn", 256, 2, mode=mode)
    bench = AttentionBench(torch.device("cuda"), repeats=3)
    bench.find_ceilings([case])
    record = bench.measure(case)
    assert record["error"] is None, record["error"]
    assert record["rival"] in ("cudnn", "flash", "efficient", "default")
    assert record["peak_bytes"] > 0 and record["memory_ratio"] > 0
    assert ("memory_ratio_materialised" in record) == (subject == "layers")


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "captured"])
def test_the_rival_with_rotary_positions_runs_compiled(mode):
    case = Case("layers", "gate+sh", 256, 2, mode=mode, scales=(1, 1, 2, 2, 4, 4, 8, 8), causal=True, rotary=True)
    record = AttentionBench(torch.device("cuda"), repeats=3).measure(case)
    assert record["error"] is None, record["error"]
    assert isinstance(record["rivals"]["compiled flash"], float), record["rivals"]


@pytest.mark.gpu
def test_working_memory_is_what_the_step_adds():
    x = torch.ones(2**20, device="cuda")
    assert working_bytes(Contestant("a", [lambda: x + 1], 0), torch.device("cuda")) == 2**22
