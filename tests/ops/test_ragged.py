"""The ragged kernels against the reference.

Where there is no GPU they run in Triton's interpreter, which must be switched on before Triton is imported: in a child
process that runs this file. It computes bfloat16 products wrongly without a word: those are tested on a GPU, and as
they are compiled for one (`test_hopper`).
"""

from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from primaldual import Primal, attention, mechanism
from primaldual.dual import derive
from primaldual.kernels import launching
from primaldual.kernels.ragged import passes
from primaldual.kernels.ragged import points as ragged_points
from primaldual.kernels.ragged import tokens as ragged_tokens
from primaldual.kernels.ragged import work as ragged_work
from primaldual.kernels.ragged.layout import HeadLayout
from primaldual.ops import UnsupportedError, plan
from primaldual.primal import Exponential, Gaussian, KernelSum, Sparse
from support.battery import HEADS, PRIMALS
from support.interpreter import HOPPER, ON_CPU, child_process, on_cpu
from support.ragged import adding_up, check, kept, replayed, sweeping
from support.rounding import rounded_at_every_step

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

# numpy's, in the interpreter: hashes wrap around, and what overflows is not selected
pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array:DeprecationWarning", "ignore:.*encountered in:RuntimeWarning"
)
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * HOPPER

TAKEN = [
    name
    for name, primal in PRIMALS.items()
    if type(primal.features) in (Exponential, Gaussian)
    and isinstance(primal.ungated.normalizer, KernelSum)
    and name != "gaussian-sink"  # refused
    and not isinstance(primal.training_set, Sparse)
]
NOT_CAUSAL = (
    "sh-prefix",
    "forget-sh",
    "sink-one",
    "bn-then-rms",
    "bn-full",
    "bn-full+sh",
    "gaussian-sh",
)  # refused: see the errors below
CAUSAL = [name for name in TAKEN if not PRIMALS[name].causal_refusal(HEADS) and name not in NOT_CAUSAL]
UNSORTED = mechanism("bn+sh", learnable=True, scales=(4, 1, 2, 1))
TWO = mechanism("bn+sh", scales=(2, 1))


test_the_kernels_in_the_interpreter = child_process(__file__)
test_more_of_them_in_the_interpreter = child_process(__file__, deep=True)


def tensors(shape=(20, 20, 8, 8), heads: int = 4, batch: int = 1, dtype=torch.float32) -> list:
    L, S, D, C = shape
    return [torch.randn(batch, heads, n, d, dtype=dtype) for n, d in ((L, D), (S, D), (S, C))]


@on_cpu
@pytest.mark.parametrize("name", TAKEN)
def test_every_softmax_mechanism_equals_the_reference(name: str) -> None:
    length = 16 if name == "conv2d" else 37
    check(PRIMALS[name], (length, length, 8, 5), torch.float32, heads=HEADS)


@on_cpu
@pytest.mark.parametrize("name", ["softmax", "bn-full+sh", "bn-learned", "sh-uneven", "sh-prefix"])
def test_padding_in_float16(name: str) -> None:
    batch = 2 if name == "softmax" else 1  # one of two has nothing to see
    check(PRIMALS[name], (37, 37, 8, 5), torch.float16, heads=HEADS, mask="padding", batch=batch)


@on_cpu
@pytest.mark.parametrize("name", CAUSAL)
def test_every_causal_form_equals_the_reference(name: str) -> None:
    check(PRIMALS[name], (19, 19, 8, 5), torch.float32, heads=HEADS, mask="padding", is_causal=True)


@on_cpu
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("hidden", [0, 6], ids=["", "left-padded"])
def test_groups_of_query_heads_share_keys(is_causal: bool, hidden: int) -> None:
    q, k, v = (x.requires_grad_() for x in tensors((19, 19, 8, 8)))
    shared = [x[:, :2].detach().clone().requires_grad_() for x in (k, v)]
    masks = {"key_padding_mask": torch.arange(19)[None] < hidden} if hidden else {}
    given = {"primal": mechanism("bn+sh", scales=(1, 4)), "is_causal": is_causal} | masks
    found = attention(q, *shared, **given, impl="ragged")
    wide = [x.detach().double().requires_grad_() for x in (q, *shared)]
    truth = attention(*wide, **given, impl="reference")
    up = torch.randn_like(found)
    for mine, expected in zip(
        (found, *torch.autograd.grad(found, (q, *shared), up)),
        (truth, *torch.autograd.grad(truth, wide, up.double())), strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(mine.double(), expected, rtol=0, atol=1e-5)


@on_cpu
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("name", ["softmax", "sh-uneven", "bn-learned"])
def test_a_bias_on_keys_and_unequal_lengths(name: str, is_causal: bool) -> None:
    for shape, dtype in (((9, 21, 8, 8), torch.float32), ((21, 9, 8, 8), torch.float16)):
        check(PRIMALS[name], shape, dtype, heads=HEADS, mask="bias", is_causal=is_causal)


@on_cpu
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 1, 8, 8), torch.float32),
        ((17, 17, 16, 24), torch.float32),
        ((127, 127, 20, 9), torch.float32),
        ((129, 129, 64, 64), torch.float32),
        ((17, 40, 128, 128), torch.float32),
        ((129, 17, 16, 16), torch.float16),
        ((17, 140, 16, 1), torch.float16),
    ],
    ids=str,
)
def test_odd_lengths_and_dimensions(shape: tuple, dtype: torch.dtype) -> None:
    check(UNSORTED, shape, dtype, heads=4)


@on_cpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scales", [(1, 1), (4, 1)], ids=str)
def test_a_causal_sequence_of_several_blocks(scales: tuple, dtype: torch.dtype) -> None:
    check(mechanism("sh", scales=scales), (129, 129, 16, 16), dtype, heads=2, is_causal=True)


@on_cpu
@pytest.mark.parametrize(
    ("scales", "shape"),
    [((1, 2, 4, 8), (37, 37, 16, 8)), ((16, 2, 2, 8), (70, 75, 8, 16)), ((1, 1, 8, 1), (5, 5, 16, 16)),
     ((1, 2, 3, 1), (37, 37, 16, 16)), ((2, 4, 1, 1), (20, 17, 16, 16)), ((1, 2, 1, 4), (70, 75, 64, 40))],
    ids=["all in one", "keys beyond the queries", "few tokens", "windows across blocks", "queries beyond the keys",
         "half of the points at a time"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_causal_heads_see_complete_windows_and_the_running_one(scales: tuple, shape: tuple, dtype: torch.dtype) -> None:
    check(mechanism("sh", scales=scales), shape, dtype, heads=4, is_causal=True)


@on_cpu
def test_causal_scaled_heads_are_one_launch_forward_and_one_that_pools() -> None:
    with adding_up(0) as launched:
        q, k, v = (x.requires_grad_() for x in tensors((40, 40, 16, 16)))
        out = attention(q, k, v, mechanism("sh", scales=(1, 2, 4, 8)), is_causal=True, impl="ragged")
        assert launched == ["pool", "forward"]
        torch.autograd.grad(out.sum(), (q, k, v))
    assert launched == ["pool", "forward", "delta", "backward"]


@on_cpu
@pytest.mark.parametrize("padded", [False, True], ids=["all", "padded"])
@pytest.mark.parametrize("primal", [PRIMALS["bn"], UNSORTED], ids=["bn", "bn+sh, learned"])
def test_points_far_from_zero_cost_no_accuracy_beside_the_reference(primal: Primal, padded: bool) -> None:
    far = [x + offset for x, offset in zip(tensors(), (1000, 1000, 0), strict=True)]
    hidden = torch.arange(20)[None] >= 13 if padded else None

    def outputs_and_gradients(dtype: torch.dtype, impl: str) -> list:
        qkv = [x.to(dtype).requires_grad_() for x in far]
        learned = {n: x.to(dtype).requires_grad_() for n, x in primal.learned(4, 8).items()}
        out = attention(*qkv, primal, impl=impl, key_padding_mask=hidden, parameters=learned)
        found = out, *torch.autograd.grad(out.square().sum(), [*qkv, *learned.values()])
        return [x.detach().double() for x in found]

    truth = outputs_and_gradients(torch.float64, "reference")
    found, beside = (outputs_and_gradients(torch.float32, impl) for impl in ("ragged", "reference"))
    for mine, reference, expected in zip(found, beside, truth, strict=True):
        assert (mine - expected).abs().max() < 1.5 * (reference - expected).abs().max()


@on_cpu
@pytest.mark.parametrize("mask", ["none", "padding"])
def test_one_program_pools_many_blocks(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "ROOM", 1)
    check(mechanism("bn+sh", scales=(3, 1, 2)), (17, 300, 8, 8), torch.float16, heads=3, mask=mask)


@on_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("mask", ["none", "padding"])
def test_windows_longer_than_a_block(mask: str, dtype: torch.dtype) -> None:
    for scales in ((100, 1, 200), (2, 70, 5)):
        check(mechanism("bn+sh", scales=scales), (17, 150, 8, 8), dtype, heads=3, mask=mask)


@on_cpu
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("primal", [UNSORTED, PRIMALS["softmax"], PRIMALS["bn"]], ids=["bn+sh", "softmax", "bn"])
def test_any_strides(primal: Primal, is_causal: bool) -> None:
    straight = tensors()
    q, k, v = straight
    strided = (
        q.transpose(1, 2).contiguous().transpose(1, 2),
        torch.stack([k, k], dim=-1).flatten(-2)[..., ::2],
        torch.cat([v, v], dim=2)[:, :, 20:],
    )
    results = []
    for qkv in (straight, strided):
        out = attention(*(x.requires_grad_() for x in qkv), primal, is_causal=is_causal, impl="ragged")
        up = torch.ones(out.shape) if qkv is straight else torch.ones(()).expand_as(out)
        results.append((out, *torch.autograd.grad(out, qkv, up)))
    for mine, other in zip(*results, strict=True):  # sums over tokens can have another order
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


@on_cpu
def test_keys_that_a_batch_shares() -> None:
    q, k, v = tensors(heads=2, batch=2)
    k, v = k[:1].requires_grad_(), v[:1].requires_grad_()
    shared, copied = (
        attention(q, *pair, TWO, impl="ragged")
        for pair in ((k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1)), (k.repeat(2, 1, 1, 1), v.repeat(2, 1, 1, 1)))
    )
    assert torch.equal(shared, copied)
    grads = [torch.autograd.grad(out.square().sum(), (k, v)) for out in (shared, copied)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@on_cpu
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("shape", [(3, 5, 8, 8), (0, 3, 8, 8), (3, 0, 8, 8)], ids=["batch", "queries", "keys"])
def test_nothing_in_gives_nothing_or_zeros(shape: tuple, is_causal: bool) -> None:
    q, k, v = (x.requires_grad_() for x in tensors(shape, batch=0 if all(shape) else 2))
    beta = torch.ones(4, requires_grad=True)
    out = attention(q, k, v, UNSORTED, is_causal=is_causal, parameters={"beta": beta}, impl="ragged")
    assert out.shape == (*q.shape[:3], shape[3])
    assert not out.any()
    assert not any(g.any() for g in torch.autograd.grad(out.sum(), (q, k, v, beta)))


@on_cpu
def test_the_log_sum_exp() -> None:
    q, k, v = tensors((9, 12, 8, 8), heads=2)
    _, lse, *_ = ragged_tokens.tokens_op(q, k, v, torch.tensor([1.0, 0.5]), [3, 1], False, 0.0, None)
    for head, (keys, beta) in enumerate(((k[0, 0].view(4, 3, 8).mean(1), 1.0), (k[0, 1], 0.5))):
        scores = (q[0, head] - beta * keys.mean(0)) @ keys.T / 8**0.5
        torch.testing.assert_close(lse[0, head], scores.logsumexp(-1))


@on_cpu
def test_queries_less_their_shift_are_kept_for_the_way_back_alone() -> None:
    q, k, v = tensors((9, 12, 8, 8), heads=2)
    beta = torch.tensor([1.0, 0.5])
    out, *_, shifted = ragged_tokens.tokens_op(q, k, v, beta, [3, 1], False, 0.0, None)
    torch.testing.assert_close(shifted, q - beta[:, None, None] * k.mean(2, keepdim=True))
    again, *_, nothing = ragged_tokens.tokens_op(q, k, v, beta, [3, 1], False, 0.0, None, back=False)
    assert torch.equal(out, again) and not nothing.numel()


@on_cpu
@pytest.mark.parametrize("length", [70, 72])  # windows that are not whole, and whole ones
@pytest.mark.parametrize("name", ["softmax", "sh", "bn", "bn+sh"])
def test_as_many_launches_as_the_plan_counts(name: str, length: int) -> None:
    primal = mechanism(name, **({"scales": (4, 1)} if name.endswith("sh") else {}))
    q, k, v = (x.requires_grad_() for x in tensors((length, length, 8, 8), heads=2))
    with adding_up() as names:
        attention(q, k, v, primal, impl="ragged").sum().backward()
    assert len(names) == plan(q, k, v, primal, impl="ragged").estimates["ragged"].launches


@on_cpu
def test_the_log_sum_exp_of_nothing_is_minus_infinity() -> None:
    q, k, v = tensors((3, 4, 8, 8), heads=1)
    bias = torch.full((1, 1, 4), -torch.inf)
    layout = [HeadLayout(0, 4, 1, 0, 32, 8, 0, 32, 8)]
    out, lse = ragged_points.attend_points(q, k.flatten(), v.flatten(), layout, 8, bias=bias)
    assert (lse == -torch.inf).all()
    assert not out.any()


@on_cpu
@pytest.mark.parametrize(
    ("primal", "p", "others"),
    [
        (UNSORTED, 0.1, {}),
        (mechanism("sh", scales=(3, 1, 1, 2)), 0.6, {"batch": 2}),
        (PRIMALS["softmax"], 0.3, {"is_causal": True}),
        (UNSORTED, 0.3, {"is_causal": True}),
        (mechanism("sh", scales=(4, 1, 2, 8)), 0.3, {"is_causal": True}),
        (UNSORTED, 0.3, {"mask": "bias"}),
    ],
    ids=["bn+sh", "sh", "causal", "bn+sh causal", "sh causal", "bn+sh bias"],
)
def test_dropout_drops_what_the_hash_says(primal: Primal, p: float, others: dict) -> None:
    with replayed(primal, 4, -123456789, others.get("is_causal", False)):
        check(primal, (37, 37, 16, 16), torch.float32, heads=4, dropout_p=p, **others)


@on_cpu
def test_dropout_over_several_blocks() -> None:
    primal = mechanism("sh", scales=(1, 2))
    with replayed(primal, 2, 7):
        check(primal, (140, 140, 16, 16), torch.float16, heads=2, dropout_p=0.3)


@pytest.fixture
def swept(monkeypatch) -> Iterator[None]:
    """Whole heads in one sweep, however few there are."""
    work, parts = ragged_work.work, []

    def note(*key):
        found = work(*key)
        parts.append(found.back.kinds)
        return found

    with sweeping():
        monkeypatch.setattr(ragged_work, "work", note)
        yield
        monkeypatch.undo()
    assert 8 in parts


@on_cpu
@pytest.mark.usefixtures("swept")
@pytest.mark.parametrize(
    ("primal", "shape", "others"),
    [
        (PRIMALS["softmax"], (37, 130, 16, 16), {"batch": 2}),
        (PRIMALS["softmax"], (128, 256, 8, 5), {}),
        (UNSORTED, (41, 150, 8, 8), {}),
        (UNSORTED, (33, 150, 5, 16), {"mask": "bias"}),
        (UNSORTED, (33, 150, 8, 8), {"mask": "learned bias"}),
        (PRIMALS["softmax"], (20, 270, 8, 8), {"mask": "padding", "batch": 2}),
        (PRIMALS["bn-learned"], (65, 140, 16, 8), {"mask": "padding"}),
    ],
    ids=["softmax", "whole blocks", "bn+sh", "bn+sh bias", "learned bias", "padding", "bn padding"],
)
def test_a_sweep_over_several_blocks(primal: Primal, shape: tuple, others: dict) -> None:
    check(primal, shape, torch.float16, heads=4, **others)


@on_cpu
@pytest.mark.usefixtures("swept")
@pytest.mark.parametrize("mask", ["none", "bias"])
def test_a_sweep_drops_what_the_hash_says(mask: str) -> None:
    with replayed(UNSORTED, 4, 11):
        check(UNSORTED, (70, 145, 8, 8), torch.float16, heads=4, dropout_p=0.3, mask=mask)


SHARED = [(32, 32, 4, 2, 0), (64, 128, 8, 2, 0)]


@pytest.fixture(params=[SHARED[0], pytest.param(SHARED[1], marks=pytest.mark.deep)], ids=lambda x: f"{x[0]}x{x[1]}")
def together(request) -> Iterator[None]:
    """Blocks of keys add their shares of dq."""
    with adding_up(*request.param) as launched:
        yield
    assert "finish_dq" in launched


@on_cpu
@pytest.mark.usefixtures("together")
@pytest.mark.parametrize(
    ("primal", "shape", "others"),
    [
        (PRIMALS["softmax"], (37, 130, 16, 16), {"batch": 2}),
        (PRIMALS["softmax"], (128, 256, 8, 5), {}),
        (PRIMALS["softmax"], (129, 133, 64, 64), {}),
        (PRIMALS["softmax"], (5, 140, 128, 24), {"heads": 1}),
        (UNSORTED, (41, 150, 8, 8), {}),
        (UNSORTED, (33, 150, 5, 16), {"mask": "bias"}),
        (PRIMALS["softmax"], (20, 270, 8, 8), {"mask": "padding", "batch": 2}),
        (PRIMALS["bn-learned"], (65, 140, 16, 8), {"mask": "padding"}),
    ],
    ids=["softmax", "whole blocks", "64", "128", "bn+sh", "bn+sh bias", "padding", "bn padding"],
)
def test_blocks_of_keys_that_add_to_dq(primal: Primal, shape: tuple, others: dict) -> None:
    check(primal, shape, torch.float16, **({"heads": 4} | others))


@on_cpu
@pytest.mark.usefixtures("together")
@pytest.mark.parametrize("mask", ["none", "bias"])
def test_blocks_that_add_to_dq_drop_what_the_hash_says(mask: str) -> None:
    with replayed(UNSORTED, 4, 11):
        check(UNSORTED, (70, 145, 8, 8), torch.float16, heads=4, dropout_p=0.3, mask=mask)


@on_cpu
@pytest.mark.usefixtures("together")
def test_blocks_that_add_to_dq_take_any_strides() -> None:
    made = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors((70, 140, 16, 16), dtype=torch.float16)]
    results = []
    for qkv in (made, [x.contiguous() for x in made]):
        out = attention(*(x.requires_grad_() for x in qkv), UNSORTED, impl="ragged")
        results.append((out, *torch.autograd.grad(out, qkv, torch.ones((), dtype=out.dtype).expand_as(out))))
    for mine, other in zip(*results, strict=True):
        assert torch.equal(mine, other)
    assert results[0][1].stride() == made[0].stride()


@on_cpu
def test_where_blocks_add_to_dq(monkeypatch) -> None:
    """Not where one block is all, or the order of sums must be the same: there a sweep, where it fills the GPU."""
    tiles = ragged_work.tiles
    monkeypatch.setattr(ragged_work, "tiles", lambda *of: tiles(*of)._replace(adding=(64, 128, 8, 2, 0)))

    def parts(points: int, dim: int, dtype=torch.bfloat16, causal: bool = False, batch: int = 3) -> tuple[int, int]:
        layout = (HeadLayout(0, points, 1, 0, points * dim, dim, 0, points * dim, dim),)
        work = ragged_work.work.__wrapped__(layout, batch, 200, dim, dtype, causal, torch.device("cpu"))
        return work.back.kinds, work.reproducible.kinds

    assert parts(200, 64) == parts(200, 16) == (16, 3)
    assert parts(64, 64) == parts(128, 16) == (4, 4)
    assert parts(200, 16, batch=1050) == (16, 8)
    assert parts(200, 64, dtype=torch.float32) == parts(200, 64, causal=True) == (3, 3)


@on_cpu
def test_sums_have_one_order_where_torch_is_told_so() -> None:
    qkv = [x.requires_grad_() for x in tensors((20, 140, 16, 16), heads=2, dtype=torch.float16)]
    with adding_up(*SHARED[0]) as launched:
        out = attention(*qkv, TWO, impl="ragged").sum()
        torch.use_deterministic_algorithms(True)
        try:
            torch.autograd.grad(out, qkv, retain_graph=True)
            assert "finish_dq" not in launched
        finally:
            torch.use_deterministic_algorithms(False)
        torch.autograd.grad(out, qkv)
        assert "finish_dq" in launched


@on_cpu
def test_many_long_heads_are_swept_where_that_fills_the_gpu() -> None:
    def parts(batch: int, points: int, dim: int, is_causal: bool = False) -> int:
        layout = (HeadLayout(0, points, 1, 0, points * dim, dim, 0, points * dim, dim),)
        device = torch.device("cpu")
        return ragged_work.work(layout, batch, 200, dim, torch.bfloat16, is_causal, device).reproducible.kinds

    assert parts(1050, 200, 16) == parts(528, 2000, 8) == 8
    assert parts(320, 4096, 32) == parts(800, 2000, 8) == 3  # the last of them would have most of the GPU idle
    assert parts(1000, 100, 16) == 4
    assert parts(10, 200, 16) == parts(1050, 200, 64) == parts(1050, 200, 16, is_causal=True) == 3


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1, -5, 2**31 - 1])
def test_what_dropout_keeps_looks_independent(seed: int, p: float) -> None:
    """Rates, and products over pairs and 2×2 squares, are within five standard deviations of independent ones."""
    B, H, L, W = 2, 3, 128, 256
    x = kept(seed, B, range(H), H, torch.arange(W).expand(L, -1), p).double() - (1 - p)
    variance = p * (1 - p)
    pairs = {
        "columns": x[..., 1:] * x[..., :-1],
        "columns of one hash": x[..., 8:] * x[..., :-8],
        "far columns": x[..., 64:] * x[..., :-64],
        "rows": x[:, :, 1:] * x[:, :, :-1],
        "heads": x[:, 1:] * x[:, :-1],
        "batches": x[1:] * x[:-1],
    }
    squares = {f"squares {d}": pairs["columns"][:, :, d:] * pairs["columns"][:, :, :-d] for d in (1, 2, 16)}
    squares["squares of one hash"] = pairs["columns of one hash"][:, :, 1:] * pairs["columns of one hash"][:, :, :-1]
    squares["runs of one hash"] = pairs["columns of one hash"][..., 16:] * pairs["columns of one hash"][..., :-16]
    squares["far squares"] = pairs["far columns"][:, :, 8:] * pairs["far columns"][:, :, :-8]
    squares["squares of heads"] = pairs["columns"][:, 1:] * pairs["columns"][:, :-1]
    for power, products in enumerate(({"rate": x}, pairs, squares)):
        for what, product in products.items():
            deviation = (variance ** (2**power) / product.numel()) ** 0.5
            assert product.mean().abs() < 5 * deviation, what
    of_rows, of_columns = x.mean(-1).square().mean() * W, x.mean(-2).square().mean() * L
    for spread, trials in ((of_rows, B * H * L), (of_columns, B * H * W)):  # rows and columns have no rate of their own
        assert abs(spread / variance - 1) < 5 * (2 / trials) ** 0.5 + 0.02


def test_seeds_drop_different_weights() -> None:
    columns = torch.arange(200).expand(200, -1)
    masks = torch.stack([kept(seed, 1, [0], 1, columns, 0.5) for seed in (0, 1, 2, -1, 2**31 - 1)]).flatten(1)
    agree = (masks[:, None] == masks[None]).double().mean(-1)
    off = agree[~torch.eye(5, dtype=torch.bool)]
    assert (off - 0.5).abs().max() < 5 * 0.5 / 200


@on_cpu
def test_dropout_follows_torch_s_generator() -> None:
    q, k, v = tensors(heads=2)

    def drop(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.stack([attention(q, k, v, TWO, dropout_p=0.5, impl="ragged") for _ in range(2)])

    first, again, other = drop(1), drop(1), drop(2)
    assert torch.equal(first, again)
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, other)


@on_cpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("scales", [[1], [2]], ids=str)
def test_opcheck_of_tokens(scales: list) -> None:
    q, k, v = tensors((5, 5, 8, 4), heads=1)
    beta, seed = torch.rand(1), torch.tensor([3], dtype=torch.int32)
    inputs = (q, k, v, beta)
    out, *rest, _, shifted = ragged_tokens.tokens_op(*inputs, scales, False, 0.5, seed)
    arguments = (out, shifted, *inputs[1:], out, *rest, scales, False, 0.5, seed)
    torch.library.opcheck(ragged_tokens._tokens_backward_op, arguments)
    torch.library.opcheck(ragged_tokens.tokens_op, (*(x.requires_grad_() for x in inputs), scales, False, 0.5, seed))


@on_cpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_opcheck_of_points() -> None:
    q, k, v = tensors((5, 5, 8, 4), heads=1)
    keys, values, own_k, own_v = (x.clone() for x in (k[:, :, :2].flatten(), v[:, :, :2].flatten(), k, v))
    layout, shift, bias = [0, 2, 2, 0, 16, 8, 0, 8, 4], torch.rand(1, 1, 8), torch.rand(1, 1, 2)
    own, sink = (own_k, own_v, torch.rand(1, 1, 5)), torch.rand(1)
    out, lse = ragged_points.points_op(q, keys, values, layout, 4, shift, bias, *own, True, 0.0, None, None, sink)
    rest = (shift, bias, *own, True, 0.0, None, None, sink)
    torch.library.opcheck(ragged_points._points_backward_op, (out, q, keys, values, out, lse, layout, *rest))
    for x in (q, keys, values, shift, own_k, own_v, sink):
        x.requires_grad_()
    torch.library.opcheck(ragged_points.points_op, (q, keys, values, layout, 4, *rest))


@on_cpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("learnable", "is_causal"), [(False, False), (True, False), (True, True)], ids=["constant", "learned", "points"]
)
def test_compiles_into_one_graph(learnable: bool, is_causal: bool) -> None:
    primal = mechanism("bn+sh", scales=(2, 1), learnable=learnable)
    learned = {name: x.requires_grad_() for name, x in primal.learned(2, 8).items()}
    qkv = [x.requires_grad_() for x in tensors((7, 7, 8, 8), heads=2)]

    def attend(q, k, v, learned):
        return attention(q, k, v, primal, is_causal=is_causal, parameters=learned, impl="ragged")

    results = []
    for call in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        out = call(*qkv, learned)
        results.append((out, *torch.autograd.grad(out.square().sum(), [*qkv, *learned.values()])))
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)


@on_cpu
@pytest.mark.parametrize("mask", [False, True], ids=["tokens", "points"])
def test_operations_are_counted(mask: bool) -> None:
    q, k, v = (x.requires_grad_() for x in tensors((20, 30, 8, 8), batch=2))
    padding = torch.zeros(2, 30, dtype=torch.bool) if mask else None
    with FlopCounterMode(display=False) as forward:
        out = attention(q, k, v, UNSORTED, key_padding_mask=padding, impl="ragged")
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(out.sum(), (q, k, v))
    expected = 2 * derive(UNSORTED).cost(queries=20, keys=30, heads=4, head_dim=8).attention
    assert forward.get_total_flops() == expected
    assert backward.get_total_flops() == 2.5 * expected


@on_cpu
def test_a_causal_query_s_own_window_is_counted() -> None:
    q, k, v = tensors((20, 20, 8, 8))
    with FlopCounterMode(display=False) as counter:
        attention(q, k, v, UNSORTED, is_causal=True, impl="ragged")
    assert counter.get_total_flops() == 2 * 20 * (5 + 20 + 10 + 20 + 2) * (8 + 8)


q = torch.randn(1, 4, 6, 8)


@on_cpu
@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [
        (lambda: attention(*tensors((6, 6, 136, 8)), "bn", impl="ragged"), UnsupportedError, r"up to 128, not 136"),
        (lambda: attention(*tensors((6, 6, 8, 136)), "bn", impl="ragged"), UnsupportedError, r"up to 128, not 136"),
        (lambda: attention(*[q.double()] * 3, "bn", impl="ragged"), UnsupportedError, r"takes float32.*not float64"),
        (lambda: attention(*[q.int()] * 3, "bn", impl="ragged"), ValueError, r"floating point, got torch.int32"),
        (
            lambda: attention(q, q, q, mechanism("sh", scales=(1, 2, 4)), impl="ragged"),
            ValueError,
            r"3 scales \(1, 2, 4\) for 4 heads",
        ),
        (lambda: attention(q, q, q, "linear", impl="ragged"), UnsupportedError, r"the ragged kernel has the exp"),
        (
            lambda: attention(q, q, q, "sparse", impl="ragged", is_causal=True),
            UnsupportedError,
            r"no causal form of sparse.*'\w+' can",
        ),
        (lambda: attention(q, q, q, "bn", impl="ragged", need_weights=True), UnsupportedError, r"'dense' can"),
        (
            lambda: attention(q, q, q, "bn", impl="ragged", attn_mask=torch.zeros(6, 6)),
            UnsupportedError,
            r"every query its own keys",
        ),
        (
            lambda: attention(q, q, q, mechanism("sh", prefix=2), impl="ragged", is_causal=True),
            UnsupportedError,
            r"unpooled prefix",
        ),
        (lambda: attention(q, q, q, PRIMALS["bn-then-rms"], impl="ragged", is_causal=True), UnsupportedError, "last"),
        (
            lambda: attention(q, q, q, PRIMALS["bn-full"], impl="ragged", is_causal=True),
            UnsupportedError,
            r"magnifies what does not cancel",
        ),
    ],
)  # fmt: skip
def test_an_error_in_place_of_wrong_numbers(call, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        call()


BIASED = {
    "softmax": mechanism("softmax"),
    "scaled": mechanism("sh", scales=(1, 2, 2, 4)),
    "pooled with a learned kernel": mechanism("sh", how="conv", scales=(1, 2, 2, 1)),  # which has a share in it
}


MORE = pytest.mark.deep
FORMS = [
    ("softmax", False), ("scaled", True), pytest.param("softmax", True, marks=MORE),
    pytest.param("scaled", False, marks=MORE), pytest.param("pooled with a learned kernel", False, marks=MORE),
    pytest.param("pooled with a learned kernel", True, marks=MORE),
]  # fmt: skip


@on_cpu
@pytest.mark.parametrize(("name", "is_causal"), FORMS)
def test_a_bias_on_keys_has_a_gradient(name: str, is_causal: bool) -> None:
    if is_causal and BIASED[name].causal_refusal(4):
        pytest.skip("no causal form")
    for length in (21, 150):  # points in one block, or in several
        shape = (length, length, 16, 8)
        check(BIASED[name], shape, torch.float32, heads=4, mask="learned bias", is_causal=is_causal, batch=2)


@on_cpu
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
def test_a_bias_has_a_gradient_where_weights_are_dropped(is_causal: bool) -> None:
    with replayed(BIASED["scaled"], 4, 11, is_causal):
        check(
            BIASED["scaled"], (37, 37, 16, 16), torch.float32, heads=4, dropout_p=0.3, mask="learned bias",
            is_causal=is_causal,
        )  # fmt: skip


@on_cpu
@pytest.mark.parametrize("adding", [(), (32, 128, 4, 3, 0)], ids=["in blocks", "adding up"])
def test_a_bias_has_a_gradient_in_every_form_of_the_way_back(adding: tuple) -> None:
    with adding_up(*adding):
        check(BIASED["softmax"], (70, 300, 16, 16), torch.float16, heads=4, mask="learned bias")


@pytest.mark.skipif(ON_CPU, reason="the interpreter runs on a CPU")
def test_a_cpu_is_refused_by_name_and_passed_over_by_auto() -> None:
    with pytest.raises(UnsupportedError, match=r"runs on a CUDA device, not on cpu; impl='sdpa' can"):
        attention(q, q, q, "bn+sh", impl="ragged")
    chosen = plan(q, q, q, "bn+sh")
    assert chosen.impl == "sdpa"
    assert "runs on a CUDA device" in dict(chosen.candidates)["ragged"]


@on_cpu
def test_where_triton_is_not_installed(monkeypatch) -> None:
    monkeypatch.setattr(launching, "_TRITON", False)
    monkeypatch.setattr(launching, "on_cpu", lambda: True)  # a device that could
    with pytest.raises(UnsupportedError, match=r"Triton is not installed; impl='sdpa' can"):
        attention(q, q, q, "bn+sh", impl="ragged")
    assert plan(q, q, q, "bn+sh").impl == "sdpa"
    assert attention(q, q, q, "bn+sh").shape == q.shape


@on_cpu
@pytest.mark.parametrize("length", [40, 200])
@pytest.mark.parametrize("name", ["bn", "bn+sh"])
def test_large_scores_of_recentred_queries_have_right_gradients(name, length) -> None:
    """Queries are rounded after the shift; scores of hundreds do not forgive another rounding in the backward pass."""
    primal = mechanism("bn") if name == "bn" else mechanism("bn+sh", scales=(1, 2))
    inputs = [
        8 * torch.randn(1, 2, length, 8) + 24,
        8 * torch.randn(1, 2, length, 8) + 24,
        torch.randn(1, 2, length, 8),
    ]
    up = torch.randn(1, 2, length, 8)
    found = {}
    for impl, dtype in (("reference", torch.float64), ("reference", torch.float16), ("ragged", torch.float16)):
        leaves = [x.half().to(dtype).requires_grad_() for x in inputs]
        with rounded_at_every_step():
            out = attention(*leaves, primal, impl=impl)
        found[impl, dtype] = [out, *torch.autograd.grad(out, leaves, up.to(dtype))]
    for mine, rough, truth in zip(
        found["ragged", torch.float16],
        found["reference", torch.float16],
        found["reference", torch.float64],
        strict=True,
    ):
        size = truth.abs().max()
        budget = 3 * ((rough - truth).abs().max() / size).item() + 0.01
        assert ((mine - truth).abs().max() / size).item() < budget


@on_cpu
@pytest.mark.parametrize("way", ["blocks", "swept", "together"])
@pytest.mark.parametrize("name", ["softmax", "sh"])
def test_scores_that_no_log_sum_exp_can_hold_have_bounded_gradients(name, way, request) -> None:
    """Weights are at most 1, and so a value gets no more than the sum of the gradients; at 10⁸ rounding says else."""
    length, dtype = (40, torch.float32) if way == "blocks" else (140, torch.float16)
    if way == "swept":
        request.getfixturevalue("swept")
    primal = mechanism("softmax") if name == "softmax" else mechanism("sh", scales=(1, 2))
    inputs = [factor * torch.randn(1, 2, length, 8) for factor in (1e4, 1e4, 1.0)]
    leaves, up = [x.to(dtype).requires_grad_() for x in inputs], torch.randn(1, 2, length, 8).to(dtype)
    with adding_up(*SHARED[0]) if way == "together" else nullcontext():
        dq, dk, dv = torch.autograd.grad(attention(*leaves, primal, impl="ragged"), leaves, up)
    assert dv.abs().max() <= up.abs().sum(2).max() * 1.01
    assert dq.isfinite().all() and dk.isfinite().all()
