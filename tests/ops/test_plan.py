"""The plan picks what is estimated to be fastest among the executors that can, and says why."""

import pytest
import torch

from primaldual import Primal, mechanism, mechanisms
from primaldual.dual import Expansion, GroupHeadsByScale, derive
from primaldual.ops import EXECUTORS, Plan, block_sparse, plan
from primaldual.ops.devices import H200
from primaldual.ops.estimates import Sizes, estimate, sizes_of
from primaldual.ops.plan import WIDTH, Candidate, amount, duration, mode_of
from primaldual.ops.problem import Problem
from primaldual.primal import Fixed, Pattern, Sparse, Strided, Window
from primaldual.primal.features import FeatureMap

q = torch.randn(1, 8, 9, 4)
EXPECTED = dict.fromkeys(mechanisms(), "sdpa")
EXPECTED |= {name: "linear" for name in mechanisms() if name.startswith(("linear", "polynomial"))}
EXPECTED |= {name: "block_sparse" for name in mechanisms() if name.startswith("sparse")}


@pytest.mark.parametrize("name", mechanisms())
def test_each_mechanism_has_its_executor(name: str) -> None:
    long = torch.randn(1, 8, 4096, 4)
    chosen = plan(long, long, long, name)
    assert chosen.impl == EXPECTED[name]
    lines = chosen.explain().splitlines()
    assert lines[0].startswith(f"{chosen.impl}: ")
    assert chosen.reason.split()[0] in lines[0]
    assert all(len(line) <= WIDTH for line in lines)
    for impl in EXECUTORS:  # one line each, with numbers or with the reason against it
        (line,) = (line for line in lines if line.startswith(f"  {impl} "))
        assert ("FLOP" in line and "launch" in line) == (impl in chosen.estimates) == ("cannot:" not in line)


@pytest.mark.parametrize("name", mechanisms())
def test_weights_take_the_matrix_of_scores(name: str) -> None:
    assert plan(q, q, q, name, need_weights=True).impl == "dense"


@pytest.mark.parametrize("name", mechanisms())
@pytest.mark.parametrize("length", [9, 64])
def test_a_matrix_of_scores_is_the_last_resort_even_where_it_would_be_faster(name: str, length: int) -> None:
    x = torch.randn(1, 8, length, 4)
    chosen = plan(x, x, x, name)
    assert chosen.impl not in ("dense", "reference")
    assert "(dense)" not in chosen.reason


def test_a_mask_per_query_takes_linear_attention_to_the_matrix_of_scores() -> None:
    mask = torch.zeros(9, 9, dtype=torch.bool)
    chosen = plan(q, q, q, "linear", attn_mask=mask)
    assert chosen.impl == "dense"
    assert chosen.explain().startswith("dense: every score once, in one matrix\n")
    assert "  linear        cannot: an attn_mask gives every query its own keys, so the sum" in chosen.explain()


def test_few_keys_are_not_worth_taking_apart() -> None:
    chosen = plan(q, q, q, "sparse")
    assert chosen.impl == "sdpa"
    assert chosen.estimates["sdpa"].seconds < chosen.estimates["block_sparse"].seconds
    assert "torch's fused kernels" in chosen.reason
    assert plan(q, q, q, "sparse", impl="block_sparse").impl == "block_sparse"


@pytest.mark.parametrize("pattern", [Strided(8), Strided(), Fixed(8), Fixed(), Window(3), Window(16)], ids=str)
@pytest.mark.parametrize("length", [30, 100, 300, 500, 1000])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_on_a_cpu_pieces_are_taken_where_they_score_a_fifth_of_the_keys(
    pattern: Pattern, length: int, causal: bool
) -> None:
    x = torch.randn(1, 2, length, 8)
    chosen = plan(x, x, x, Primal(training_set=Sparse(pattern)), is_causal=causal)
    found = chosen.estimates
    assert chosen.impl == ("block_sparse" if 5 * found["block_sparse"].flops <= found["sdpa"].flops else "sdpa")


@pytest.mark.parametrize(
    ("length", "batch", "winner"), [(93, 320, "sdpa"), (1000, 40, "sdpa"), (16384, 2, "block_sparse")]
)
def test_on_a_gpu_pieces_in_plain_torch_pay_in_long_sequences_alone(length: int, batch: int, winner: str) -> None:
    """With dropout FlexAttention does not run: at 93 steps a layer took 1.7 ms in pieces."""
    x = torch.empty(batch, 8, length, 8, device="meta", dtype=torch.bfloat16)
    primal = mechanism("sparse", stride="sqrt")
    pieces = sizes_of(Problem(Expansion(primal), x, x, x, dropout_p=0.1), True, True)
    sizes = pieces._replace(device=H200, plain=True)
    found = {impl: estimate(impl, sizes).seconds for impl in ("sdpa", "block_sparse")}
    assert min(found, key=found.__getitem__) == winner
    if length == 93:
        assert found["block_sparse"] == pytest.approx(1.7e-3, rel=0.3)


@pytest.mark.parametrize("pattern", [Strided(), Strided(None), Fixed(), Window(16)], ids=str)
@pytest.mark.parametrize(("length", "batch"), [(93, 320), (405, 320), (1000, 40), (1751, 320), (2048, 8)])
def test_on_a_gpu_patterns_with_dropout_are_kept_by_our_kernel(pattern: Pattern, length: int, batch: int) -> None:
    x = torch.empty(batch, 8, length, 16, device="meta", dtype=torch.bfloat16)
    primal = Primal(training_set=Sparse(pattern))
    described = sizes_of(Problem(Expansion(primal), x, x, x, dropout_p=0.1), True, True)
    sizes = described._replace(device=H200, plain=True, compiled=True)
    found = {impl: estimate(impl, sizes).seconds for impl in ("sdpa", "block_sparse", "ragged")}
    assert min(found, key=found.__getitem__) == "ragged"
    softmax = sizes._replace(pieces=0, masked=False, compiled=False)
    assert estimate("ragged", sizes).flops == estimate("ragged", softmax).flops
    assert estimate("ragged", sizes).device > estimate("ragged", softmax).device
    candidates = tuple(Candidate(name, None if name in found else "not here") for name in EXECUTORS)
    assert "every score and keeps the pattern's" in " ".join(
        Plan("ragged", False, candidates, sizes, Expansion(primal)).explain().split()
    )


def test_on_a_gpu_long_patterns_without_dropout_stay_with_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_sparse, "_flex_runs", lambda p: True)
    x = torch.empty(2, 8, 16384, 64, device="meta", dtype=torch.bfloat16)
    problem = Problem(Expansion(mechanism("sparse", stride="sqrt")), x, x, x)
    for captured in (False, True):
        sizes = sizes_of(problem, True, captured)._replace(device=H200)
        assert estimate("block_sparse", sizes).seconds < estimate("ragged", sizes).seconds


def test_a_pattern_of_one_s_own_runs_on_the_dense_mask() -> None:
    class Even(Pattern):
        def allows(self, i, j, length):
            return (i + j) % 2 == 0

    primal = mechanism("softmax").__class__(training_set=Sparse(Even()))
    assert plan(q, q, q, primal).impl == "sdpa"
    assert "Pattern.pieces" in plan(q, q, q, primal).explain()


def test_features_that_do_not_say_how_many_they_are_have_a_plan() -> None:
    class Square(FeatureMap):
        def features(self, x):
            return x.square()

    chosen = plan(q, q, q, Primal(features=Square()))
    assert chosen.impl == "linear"
    assert "Φ is finite" in chosen.explain()


def test_what_was_asked_for_says_so() -> None:
    chosen = plan(q, q, q, "softmax", impl="reference")
    assert chosen.explain().startswith("reference: asked for\n")
    assert set(chosen.estimates) == {"sdpa", "dense", "reference"}


def test_the_passes_count_by_whether_gradients_are_kept() -> None:
    once, kept = plan(q, q, q, "softmax"), plan(q.clone().requires_grad_(), q, q, "softmax")
    assert not once.sizes.backward and kept.sizes.backward
    assert kept.estimates["sdpa"].flops == 3.5 * once.estimates["sdpa"].flops
    assert "forward and backward" in kept.explain()
    with torch.no_grad():
        assert mode_of(q.clone().requires_grad_()) == (False, False)


def on_an_h200(captured: bool, impl: str) -> Plan:
    groups = ((1, 2, 1024), (2, 2, 512), (4, 2, 256), (8, 2, 128))
    sizes = Sizes(H200, torch.bfloat16, 8, 1024, 1024, 64, 64, groups, backward=True, captured=captured)
    refused = {"linear": "Exponential() is not finite", "block_sparse": "the training set is not Sparse"}
    refused |= {"recentred": "no re-centring", "mixed": "no head is long enough"}
    candidates = tuple(Candidate(name, refused.get(name)) for name in EXECUTORS)
    return Plan(impl, False, candidates, sizes, derive("sh", (GroupHeadsByScale,)))


def test_an_explanation_names_the_winner_the_rival_and_the_reason() -> None:
    lines = on_an_h200(True, "ragged").explain().splitlines()
    assert lines[0].startswith("ragged: ") and lines[0].endswith(" µs (sdpa): one launch for all scales")
    assert lines[1:3] == [
        "  linear        cannot: Exponential() is not finite",
        "  block_sparse  cannot: the training set is not Sparse",
    ]
    assert lines[4].split()[:3] == ["sdpa", "28", "GFLOP"] and "35 launches" in lines[4]
    assert lines[5].split()[:3] == ["ragged", "28", "GFLOP"] and "4 launches" in lines[5]
    assert lines[-2] == "  rewrites: heads grouped by scale"
    assert lines[-1] == "  estimated for bfloat16, forward and backward, captured, on an H200"


def test_where_the_host_decides_the_explanation_says_so() -> None:
    lines = on_an_h200(False, "ragged").explain().splitlines()
    assert lines[0].endswith(" ms (sdpa): less work for the host")
    assert lines[4].endswith(" ms (host)") and lines[5].endswith(" µs (host)")
    assert lines[-1].endswith("eager, on an H200")


def test_long_heads_go_back_through_cudnn_s_kernels_captured() -> None:
    x = torch.empty(8, 8, 4096, 64, device="meta", dtype=torch.bfloat16)
    problem = Problem(Expansion(mechanism("sh")), x, x, x)
    found = {}
    for backward, captured in ((True, True), (True, False), (False, True)):
        sizes = sizes_of(problem, backward, captured)._replace(device=H200)
        assert sizes.long == 2
        seconds = {impl: estimate(impl, sizes).seconds for impl in ("sdpa", "ragged", "mixed")}
        found[backward, captured] = min(seconds, key=seconds.__getitem__)
    assert found == {(True, True): "mixed", (True, False): "ragged", (False, True): "ragged"}
    captured = sizes_of(problem, True, True)._replace(device=H200)
    candidates = tuple(Candidate(name, None if name in seconds else "not here") for name in EXECUTORS)
    chosen = Plan("mixed", False, candidates, captured, Expansion(problem.primal))
    assert "our kernel forward, and cuDNN's backward for long heads" in " ".join(chosen.explain().split())


@pytest.mark.parametrize(("length", "batch"), [(1024, 32), (4096, 8), (16384, 2)], ids=str)
def test_causal_scaled_heads_over_tokens_are_left_to_cudnn_captured(length: int, batch: int) -> None:
    x = torch.empty(batch, 8, length, 64, device="meta", dtype=torch.bfloat16)
    problem = Problem(Expansion(mechanism("sh", scales=(1, 1, 2, 2, 4, 4, 8, 8))), x, x, x, is_causal=True)
    sizes = sizes_of(problem, True, True)._replace(device=H200)
    found = {impl: estimate(impl, sizes).seconds for impl in ("sdpa", "ragged", "mixed")}
    assert min(found, key=found.__getitem__) == "mixed"
    measured = {4096: 830e-6, 16384: 2545e-6}.get(length, found["mixed"])
    assert 0.85 < found["mixed"] / measured < 1.15


def test_numbers_are_readable() -> None:
    assert [amount(x, "B") for x in (12, 999, 1000, 8.14e9, 9.96e9, 9.8e7, 4e18)] == [
        "12 B", "999 B", "1.0 kB", "8.1 GB", "10 GB", "98 MB", "4000 PB",
    ]  # fmt: skip
    assert [duration(x) for x in (0.0, 2.34e-6, 1.03e-4, 9.9e-4, 1.27e-3, 0.0176, 15.2)] == [
        "0 µs", "2.3 µs", "103 µs", "990 µs", "1.3 ms", "18 ms", "15 s",
    ]  # fmt: skip
