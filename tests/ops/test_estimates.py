"""The estimates against measurements: H200 (torch 2.11, bfloat16) and two CPU cores (results/cpu/attention.json)."""

import pytest
import torch

from primaldual import mechanism
from primaldual.dual import Expansion
from primaldual.kernels.cudnn import beside as parallel
from primaldual.kernels.ragged import layout as layouts
from primaldual.kernels.ragged import work as ragged_work
from primaldual.ops import block_sparse
from primaldual.ops.block_sparse import Problem
from primaldual.ops.devices import CPU, H200, device_of
from primaldual.ops.estimates import TRAINING, Sizes, estimate, sizes_of
from primaldual.primal import Fixed, Pooled, Primal, Sparse, Strided, Window

SH = (1, 1, 2, 2, 4, 4, 8, 8)
SHAPES = {  # batch, length, head_dim, scales of scaled heads
    "128": (32, 128, 64, SH),
    "512": (16, 512, 64, SH),
    "1024": (8, 1024, 64, SH),
    "4096": (8, 4096, 64, SH),
    "16384": (4, 16384, 64, SH),
    "LRA": (32, 4096, 32, (1, 2)),
    "SCP1": (64, 896, 16, SH),
}
SOFTMAX = {"128": 37, "512": 113, "1024": 173, "4096": 2265, "16384": 17600, "LRA": 2050, "SCP1": 870}
RAGGED = {"128": 29, "512": 74, "1024": 103, "4096": 1217, "16384": 9200, "LRA": 1320, "SCP1": 306}
BESIDE = {"4096": 1107, "16384": 8180}
STREAMS = {"128": 85, "512": 139, "1024": 164, "4096": 1246, "16384": 8556, "LRA": 1630, "SCP1": 575}
"""µs, forward and backward, captured: softmax by cuDNN, then scaled heads by our kernel, by ours with cuDNN's backward
pass for long ones, and by cuDNN on a stream per scale, which group by group it cannot beat."""

CAPTURED = 1.3
"""How far off an estimate of the device may be, either way."""

EAGER = 1.4
"""The same where the host decides: it is another machine each time."""


def sizes(shape: str, scaled: bool, captured: bool, backward: bool = True) -> Sizes:
    batch, length, dim, scales = SHAPES[shape]
    scales = scales if scaled else (1,) * len(scales)
    groups = tuple((s, scales.count(s), -(-length // s)) for s in sorted(set(scales)))
    long = sum(parallel.long(length, points, dim) for _, _, points in groups) if scaled else 0
    return Sizes(H200, torch.bfloat16, batch, length, length, dim, dim, groups, backward, captured, long=long)


def off(seconds: float, microseconds: float) -> float:
    """By which factor an estimate differs, at least 1."""
    ratio = seconds * 1e6 / microseconds
    return max(ratio, 1 / ratio)


@pytest.mark.parametrize(
    ("impl", "scaled", "shape", "measured"),
    [("sdpa", False, *row) for row in SOFTMAX.items()]
    + [("ragged", True, *row) for row in RAGGED.items()]
    + [("sdpa", True, *row) for row in STREAMS.items()]
    + [("mixed", True, *row) for row in BESIDE.items()],
)
def test_captured_steps_take_what_was_measured(impl: str, scaled: bool, shape: str, measured: float) -> None:
    assert off(estimate(impl, sizes(shape, scaled, captured=True)).seconds, measured) < CAPTURED


@pytest.mark.parametrize(
    ("impl", "scaled", "shape", "measured"),
    [("sdpa", False, "128", 200), ("sdpa", False, "512", 190), ("sdpa", False, "1024", 185)]
    + [("ragged", True, "128", 640), ("ragged", True, "1024", 650), ("ragged", True, "4096", 1290)]
    + [("sdpa", True, shape, 2600) for shape in ("128", "512", "1024", "4096")],
)
def test_eager_steps_take_what_was_measured(impl: str, scaled: bool, shape: str, measured: float) -> None:
    found = estimate(impl, sizes(shape, scaled, captured=False))
    assert off(found.seconds, measured) < EAGER
    assert (found.host > found.device) == (measured != 1290)


@pytest.mark.parametrize("shape", RAGGED)
def test_captured_scaled_heads_are_ranked_as_measured(shape: str) -> None:
    measured = {"ragged": RAGGED[shape], "sdpa": STREAMS[shape]}
    measured |= {"mixed": BESIDE[shape]} if shape in BESIDE else {}
    found = {impl: estimate(impl, sizes(shape, True, captured=True)).seconds for impl in measured}
    assert min(found, key=found.__getitem__) == min(measured, key=measured.__getitem__)


@pytest.mark.parametrize("shape", RAGGED)
def test_captured_inference_of_scaled_heads_takes_our_kernel(shape: str) -> None:
    """At 4096 and 16384 328 and 2286 µs against 352 and 2491 of cuDNN's on streams."""
    impls = ("ragged", "sdpa", "mixed") if shape in BESIDE else ("ragged", "sdpa")
    ragged, *others = (estimate(impl, sizes(shape, True, True, backward=False)).seconds for impl in impls)
    assert ragged < min(others)


def test_cpp_leaves_the_host_less_to_do() -> None:
    """Eager, scaled heads with what `primaldual build` makes."""
    for shape, measured in (("128", 290), ("1024", 300), ("4096", 1200)):
        found = estimate("ragged", sizes(shape, True, captured=False)._replace(compiled=True))
        assert off(found.seconds, measured) < EAGER


def test_cudnn_is_slower_where_it_is_not_to_be_trusted() -> None:
    """576 keys are four blocks and a half; flash takes 1.6 times as long."""
    shapes = [
        Sizes(H200, torch.bfloat16, 80, 1152, keys, 64, 64, ((1, 8, keys),), True, True) for keys in (576, 577)
    ]  # fmt: skip
    odd, even = (estimate("sdpa", shape).seconds for shape in shapes)
    assert off(odd, 2226) < CAPTURED and off(even, 1381) < CAPTURED and odd > even
    odd, even = (estimate("sdpa", shape._replace(dtype=torch.float32)).seconds for shape in shapes)
    assert odd < even  # cuDNN takes 16 bits alone


@pytest.mark.parametrize(
    ("batch", "length", "dim", "sdpa", "ragged"),
    [(80, 1152, 64, 2880, 2540), (320, 1000, 64, 9380, 8340), (320, 896, 16, 6830, 2980), (320, 1751, 8, 24950, 11230)],
)
def test_dropout_takes_what_was_measured_and_ours_is_the_cheaper(batch, length, dim, sdpa, ragged) -> None:
    """Captured, 8 heads, dropout 0.1."""
    shape = Sizes(
        H200, torch.bfloat16, batch, length, length, dim, dim, ((1, 8, length),), True, True, dropout=True
    )  # fmt: skip
    found = {impl: estimate(impl, shape).seconds for impl in ("sdpa", "ragged")}
    assert off(found["ragged"], ragged) < CAPTURED
    assert sdpa is None or off(found["sdpa"], sdpa) < CAPTURED
    assert found["ragged"] < found["sdpa"]


@pytest.mark.parametrize("shape", ["128", "512", "1024"])
def test_eager_softmax_stays_with_torch(shape: str) -> None:
    assert estimate("sdpa", sizes(shape, False, False)).seconds < estimate("ragged", sizes(shape, False, False)).seconds


def test_a_captured_graph_has_no_host() -> None:
    assert estimate("sdpa", sizes("128", True, captured=True)).host == 0.0


def sparse(length: int, batch: int, primal: Primal, monkeypatch: pytest.MonkeyPatch) -> Sizes:
    monkeypatch.setattr(block_sparse, "_flex_runs", lambda p: True)
    x = torch.empty(batch, 8, length, 64, device="meta", dtype=torch.bfloat16)
    problem = Problem(Expansion(primal), x, x, x)
    return sizes_of(problem, backward=True, captured=False)._replace(device=H200)


STRIDED = Primal(training_set=Sparse(Strided(None)))
STRIDED_SH = Primal(training_set=Sparse(Strided(None), Pooled(SH)))


@pytest.mark.parametrize(
    ("primal", "measured"),
    [(STRIDED, 3750), (Primal(training_set=Sparse(Fixed(None))), 4180), (Primal(training_set=Sparse(Window(64))), 1600),
     (STRIDED_SH, 14500)],
    ids=["strided", "fixed", "window", "strided+sh"],
)  # fmt: skip
def test_pieces_at_16384_take_what_was_measured(
    primal: Primal, measured: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = estimate("block_sparse", sparse(16384, 2, primal, monkeypatch))
    assert off(found.seconds, measured) < EAGER
    assert found.host > found.device


@pytest.mark.parametrize(("primal", "measured"), [(STRIDED, 3800), (STRIDED_SH, 2750)], ids=["strided", "strided+sh"])
def test_dense_masks_at_4096_take_what_was_measured(
    primal: Primal, measured: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert off(estimate("sdpa", sparse(4096, 4, primal, monkeypatch)).seconds, measured) < EAGER


def test_many_pieces_pay_only_in_long_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    for length, winner in ((4096, "sdpa"), (32768, "block_sparse")):
        described = sparse(length, 2, STRIDED_SH, monkeypatch)
        found = {impl: estimate(impl, described).seconds for impl in ("sdpa", "block_sparse")}
        assert min(found, key=found.__getitem__) == winner


def test_linear_attention_moves_four_tensors() -> None:
    shape = Sizes(
        H200, torch.bfloat16, 1, 65536, 65536, 64, 64, ((1, 8, 65536),), False, True, features=64, kernel=True
    )
    found = estimate("linear", shape)
    assert found.bytes == 4 * 8 * 65536 * 64 * 2
    assert off(found.seconds, 80) < CAPTURED
    assert estimate("linear", shape._replace(kernel=False)).seconds > 2 * found.seconds


@pytest.mark.parametrize(
    ("name", "batch", "length", "causal", "measured"),
    [("softmax", 4, 2048, False, 0.949), ("bn", 4, 2048, False, 1.010), ("sh", 4, 2048, False, 0.485),
     ("bn+sh", 4, 2048, False, 0.464), ("sparse", 4, 2048, False, 0.596), ("linear", 1, 16384, False, 0.498),
     ("linear", 1, 16384, True, 1.144)],
)  # fmt: skip
def test_a_cpu_takes_what_was_measured(name: str, batch: int, length: int, causal: bool, measured: float) -> None:
    x = torch.empty(batch, 8, length, 64, device="meta")
    primal = mechanism(name, **({"stride": "sqrt"} if name == "sparse" else {}))
    problem = Problem(Expansion(primal), x, x, x, is_causal=causal)
    described = sizes_of(problem, backward=True, captured=False)
    impl = {"sparse": "block_sparse", "linear": "linear"}.get(name, "sdpa")
    found = estimate(impl, described)
    assert off(found.seconds, measured * 1e6) < 1.6
    assert found.host == 0.0


def test_flops_are_those_that_are_needed() -> None:
    """Not those of padded heads: 4·B·L·D for each key of each head, and 3.5 times that with gradients."""
    shape = sizes("SCP1", True, True, backward=False)
    keys = 2 * (896 + 448 + 224 + 112)
    for impl in ("sdpa", "ragged"):
        assert estimate(impl, shape).flops == 4 * 64 * 896 * 16 * keys
        assert estimate(impl, shape._replace(backward=True)).flops == TRAINING * estimate(impl, shape).flops
        assert estimate(impl, shape._replace(backward=True)).launches > estimate(impl, shape).launches


@pytest.mark.parametrize("mask", ["causal", "masked"])
def test_what_masks_leave_and_cost(mask: str) -> None:
    plain = sizes("1024", False, True)
    other = plain._replace(**{mask: True})
    faster = estimate("sdpa", other).seconds < estimate("sdpa", plain).seconds
    assert faster == (mask == "causal")


def test_other_gpus_scale_by_their_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, multi_processor_count = "NVIDIA A100", 108

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    found = device_of(torch.device("cuda", 0))
    assert found.rates[torch.bfloat16] == pytest.approx(H200.rates[torch.bfloat16] * 108 / 132)
    assert "A100" in found.name and "H200" in found.name
    Properties.name, Properties.multi_processor_count = "NVIDIA H200", 132
    assert device_of(torch.device("cuda", 0)) is H200
    assert device_of(torch.device("cpu")) is CPU


def test_causal_work_begins_with_what_sees_most() -> None:
    scales, length = (1, 1, 2, 4), 512
    layout = layouts.pooled(scales, 2, length, 64, 64)
    found = ragged_work.work(layout, 2, length, 64, torch.bfloat16, True, torch.device("cpu"))

    def points(row: int, end: int) -> int:
        return -(-min(end, length) // layout[row].window)

    seen = [points(row, (m + 1) * found.tile.rows) for _, row, _, m in found.forward.tolist()]
    assert seen == sorted(seen, reverse=True) and len(seen) == 2 * len(scales) * -(-length // found.tile.rows)
    tile, pairs = found.back.tile, []
    for kind, row, _, block in found.back.tasks.tolist():
        if kind == ragged_work.KEYS:
            pairs.append(4 * tile.key_columns * (length - block * tile.key_columns * layout[row].window))
        else:
            pairs.append(3 * tile.query_rows * points(row, (block + 1) * tile.query_rows))
    assert pairs == sorted(pairs, reverse=True)
