"""Sparse heads in the ragged kernels, against the reference; and the integers that tell the kernels what to keep.

Where there is no GPU the kernels run in Triton's interpreter, in a child process that runs this file.
"""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton")

from primaldual import Primal, attention, mechanism
from primaldual.kernels.ragged import marks as ragged_marks
from primaldual.kernels.ragged import points as ragged_points
from primaldual.kernels.ragged import tokens as ragged_tokens
from primaldual.ops import UnsupportedError, plan
from primaldual.primal import AllKeys, Fixed, Pattern, Pooled, Sparse, Strided, Window
from primaldual.primal.patterns import Band, Block, Piece, Residues, Summary
from support.battery import PRIMALS
from support.interpreter import child_process, on_cpu
from support.ragged import adding_up, check, replayed, sweeping

# numpy's, in the interpreter: hashes wrap around, and what overflows is not selected
pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array:DeprecationWarning", "ignore:.*encountered in:RuntimeWarning"
)
SCALES = (4, 1, 3)
PATTERNS = {"strided": Strided(None), "fixed": Fixed(6, 2), "window": Window(4)}
MECHANISMS = {
    f"{name} {pattern}": mechanism(name, pattern=PATTERNS[pattern], **({"scales": SCALES} if "sh" in name else {}))
    for name in ("sparse", "sparse-bn", "sparse-sh", "sparse-bn+sh")
    for pattern in PATTERNS
}


test_the_kernels_in_the_interpreter = child_process(__file__)
test_more_of_them_in_the_interpreter = child_process(__file__, deep=True)


def tensors(shape=(20, 20, 8, 8), heads: int = 3, batch: int = 1) -> list[torch.Tensor]:
    L, S, D, C = shape
    return [torch.randn(batch, heads, n, d) for n, d in ((L, D), (S, D), (S, C))]


@on_cpu
@pytest.mark.parametrize(
    ("mask", "dropout_p"),
    [("none", 0.0), ("padding", 0.3), pytest.param("none", 0.3, marks=pytest.mark.deep),
     pytest.param("padding", 0.0, marks=pytest.mark.deep)],
    ids=["all weights", "dropout, padding", "dropout", "padding"],
)  # fmt: skip
@pytest.mark.parametrize("name", MECHANISMS)
def test_every_pattern_equals_the_reference(name: str, mask: str, dropout_p: float) -> None:
    primal = MECHANISMS[name]
    with replayed(primal, 3, -77):
        check(primal, (37, 37, 8, 5), torch.float32, heads=3, mask=mask, dropout_p=dropout_p)


@on_cpu
@pytest.mark.parametrize("way", ["passes", "swept", "together"])
@pytest.mark.parametrize("name", [name for name in MECHANISMS if name.startswith("sparse-bn+sh")])
def test_several_blocks(name: str, way: str) -> None:
    """Two passes over the scores, one sweep over a head, or blocks of keys that add to dq."""
    primal = MECHANISMS[name]
    length, dtype = (70, torch.float32) if way == "passes" else (145, torch.float16)
    ways = {"passes": nullcontext, "swept": sweeping, "together": lambda: adding_up(64, 128, 8, 2, 0)}
    with replayed(primal, 3, 5), ways[way]():
        check(primal, (length, length, 16, 16), dtype, heads=3, dropout_p=0.2, mask="padding")
    with ways[way]():
        check(primal, (33, length, 8, 8), dtype, heads=3)


@on_cpu
@pytest.mark.parametrize("shape", [(9, 41, 8, 8), (41, 9, 8, 8), (1, 1, 8, 8)], ids=str)
@pytest.mark.parametrize("pattern", [Strided(3), Fixed(None), Window(2), Window(0)], ids=str)
def test_unequal_lengths(pattern: Pattern, shape: tuple[int, int, int, int]) -> None:
    """Queries beyond a window's reach see nothing."""
    primal = mechanism("sparse-bn+sh", pattern=pattern, scales=(2, 1))
    for mask in ("none", "bias"):
        check(primal, shape, torch.float32, heads=2, mask=mask, batch=2)


@on_cpu
@pytest.mark.parametrize("name", ["sparse-full-prefix", "max", "conv", "grid"])
def test_other_pooling(name: str) -> None:
    pooled = {
        "max": Pooled((4, 1, 2), how="max"),
        "conv": Pooled((4, 1, 2), how="conv"),
        "grid": Pooled((2, 1, 3), grid=(6, 6)),
    }
    over = pooled.get(name, Pooled((2, 1, 3), prefix=2))
    inputs = PRIMALS["sparse-full-prefix"].inputs
    primal = Primal(inputs=inputs, training_set=Sparse(Strided(3), over))
    for mask in ("none", "padding"):
        check(primal, (36, 36, 8, 8), torch.float32, heads=3, mask=mask)


@on_cpu
def test_a_query_that_sees_nothing_has_zeros_and_a_log_sum_exp_of_minus_infinity() -> None:
    q, k, v = tensors((9, 3, 8, 8), heads=2)
    marks = ragged_marks.marks(Sparse(Window(1)), (1, 1), 9, 3, q.device)
    out, lse, *_ = ragged_tokens.tokens_op(q, k, v, None, [1, 1], False, 0.0, None, marks)
    assert (lse[:, :, 4:] == -torch.inf).all() and lse[:, :, :4].isfinite().all()
    assert not out[:, :, 4:].any() and out[:, :, :4].any()


@on_cpu
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=str)
def test_hidden_scores_of_any_size_leave_no_trace(pattern: Pattern) -> None:
    """Those that a pattern does not keep can be far above the log-sum-exp of those that it keeps."""
    primal = Primal(training_set=Sparse(pattern))
    leaves = [(8 * x if i < 2 else x).requires_grad_() for i, x in enumerate(tensors((37, 37, 8, 8)))]
    results = []
    for impl in ("ragged", "reference"):
        out = attention(*leaves, primal, impl=impl)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-3 * float(other.detach().abs().max()))


@on_cpu
def test_any_strides() -> None:
    straight = tensors()
    q, k, v = straight
    strided = (
        q.transpose(1, 2).contiguous().transpose(1, 2),
        torch.stack([k, k], dim=-1).flatten(-2)[..., ::2],
        torch.cat([v, v], dim=2)[:, :, 20:],
    )
    results = []
    for qkv in (straight, strided):
        out = attention(*(x.requires_grad_() for x in qkv), MECHANISMS["sparse-bn+sh strided"], impl="ragged")
        results.append((out, *torch.autograd.grad(out.sum(), qkv)))
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


@on_cpu
@pytest.mark.parametrize("shape", [(3, 5, 8, 8), (0, 3, 8, 8), (3, 0, 8, 8)], ids=["batch", "queries", "keys"])
def test_nothing_in_gives_nothing_or_zeros(shape: tuple[int, int, int, int]) -> None:
    q, k, v = (x.requires_grad_() for x in tensors(shape, batch=0 if all(shape) else 2))
    out = attention(q, k, v, MECHANISMS["sparse-bn+sh strided"], impl="ragged")
    assert out.shape == (*q.shape[:3], shape[3])
    assert not out.any()
    assert not any(g.any() for g in torch.autograd.grad(out.sum(), (q, k, v)))


def of(primal: Primal, q: torch.Tensor) -> tuple:
    """What the marks of heads depend on, with as many keys as queries."""
    scales = primal.training_set.head_scales(q.shape[1])
    return primal.training_set, scales, q.shape[2], q.shape[2], q.device


@on_cpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("pattern", [Strided(2), Window(1)], ids=str)
def test_opcheck(pattern: Pattern) -> None:
    q, k, v = tensors((5, 5, 8, 4), heads=1)
    marks = ragged_marks.marks(*of(mechanism("sparse", pattern=pattern), q))
    beta, seed = torch.rand(1), torch.tensor([3], dtype=torch.int32)
    tail = ([1], False, 0.5, seed, marks)
    out, *rest, _, shifted = ragged_tokens.tokens_op(q, k, v, beta, *tail)
    torch.library.opcheck(ragged_tokens._tokens_backward_op, (out, shifted, k, v, beta, out, *rest, *tail))
    keys, values = k.flatten().clone(), v.flatten().clone()
    layout = [0, 5, 1, 0, 40, 8, 0, 20, 4]
    tail = (None, None, None, None, None, False, 0.5, seed, marks)
    out, lse = ragged_points.points_op(q, keys, values, layout, 4, *tail)
    torch.library.opcheck(ragged_points._points_backward_op, (out, q, keys, values, out, lse, layout, *tail))
    for x in (q, k, v, beta, keys, values):
        x.requires_grad_()
    torch.library.opcheck(ragged_tokens.tokens_op, (q, k, v, beta, [1], False, 0.5, seed, marks))
    torch.library.opcheck(ragged_points.points_op, (q, keys, values, layout, 4, *tail))


@on_cpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("padded", [False, True], ids=["tokens", "points"])
def test_compiles_into_one_graph(padded: bool) -> None:
    qkv = [x.requires_grad_() for x in tensors((7, 7, 8, 8))]
    hidden = torch.tensor([[False] * 5 + [True] * 2]) if padded else None

    def attend(q, k, v):
        primal = MECHANISMS["sparse-bn+sh strided"]
        return attention(q, k, v, primal, key_padding_mask=hidden, impl="ragged")

    results = []
    for call in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        out = call(*qkv)
        results.append((out, *torch.autograd.grad(out.square().sum(), qkv)))
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)


@on_cpu
def test_every_score_is_counted() -> None:
    q, k, v = (x.requires_grad_() for x in tensors((20, 30, 8, 8), batch=2))
    with FlopCounterMode(display=False) as forward:
        out = attention(q, k, v, MECHANISMS["sparse-sh strided"], impl="ragged")
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(out.sum(), (q, k, v))
    expected = 2 * 2 * 20 * (8 + 30 + 10) * (8 + 8)
    assert forward.get_total_flops() == expected
    assert backward.get_total_flops() == 2.5 * expected


class TwoBands(Pattern):
    def pieces(self, length: int) -> tuple[Piece, ...]:
        return Band(1), Band(3, own=False)


class OtherSummaries(Pattern):
    def pieces(self, length: int) -> tuple[Piece, ...]:
        return Block(4), Summary(3, 1)


class Even(Pattern):
    def allows(self, i, j, length):
        return (i + j) % 2 == 0


x = torch.randn(1, 2, 6, 8)


@on_cpu
@pytest.mark.parametrize(
    ("pattern", "is_causal", "says"),
    [
        (Strided(8), True, r"no causal form of sparse patterns.*'block_sparse' can"),
        (Even(), False, r"Pattern.pieces.*'sdpa' can"),
        (TwoBands(), False, r"one band and one residue class"),
        (OtherSummaries(), False, r"blocks and their summaries"),
    ],
    ids=["causal", "unknown", "two bands", "other summaries"],
)
def test_an_error_in_place_of_wrong_numbers(pattern: Pattern, is_causal: bool, says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        attention(x, x, x, Primal(training_set=Sparse(pattern)), is_causal=is_causal, impl="ragged")


def test_long_periods_of_long_sequences_are_refused() -> None:
    """Where the points of other residue classes would come too close on the circle."""
    assert ragged_marks.refusal(Strided(None), 65536, 65536) is None
    assert ragged_marks.refusal(Strided(20000), 25000, 25000) is None
    assert "modulo 20000" in (ragged_marks.refusal(Strided(20000), 65536, 65536) or "")


@on_cpu
def test_the_plan_says_what_is_computed() -> None:
    chosen = plan(x, x, x, "sparse", impl="ragged")
    assert chosen.estimates["ragged"].flops == chosen.estimates["sdpa"].flops
    assert "every score and keeps the pattern's" in chosen._replace(asked=False).reason


def kept(marks: torch.Tensor, queries: int, points: int) -> torch.Tensor:
    """What the integers of one head say, in 64 bits."""
    span, step, phase_span = (int(number) % 2**32 for number in marks[0, :3])
    j, marks = torch.arange(points), marks[:, :queries, None].long()
    found = (j - marks[1]) % 2**32 <= span
    return found | ((j * step + marks[2]) % 2**32 <= phase_span) if len(marks) == 3 else found


patterns = st.one_of(
    st.builds(Strided, st.none() | st.integers(1, 70) | st.just(10**9)),
    st.integers(1, 70).flatmap(lambda block: st.builds(Fixed, st.just(block), st.integers(1, block))),
    st.builds(Fixed, st.none(), st.integers(1, 9)),
    st.builds(Fixed, st.just(10**9), st.integers(1, 9)),
    st.builds(Window, st.none() | st.integers(0, 70) | st.just(10**12)),
)
poolings = st.one_of(
    st.just(AllKeys()), st.builds(lambda s, p: Pooled((s, 1), prefix=p), st.integers(1, 9), st.integers(0, 3))
)


@settings(max_examples=300, deadline=None)
@given(patterns, poolings, st.integers(1, 300), st.integers(1, 300))
def test_the_integers_say_what_the_pattern_says(pattern, over, queries: int, tokens: int) -> None:
    sparse = Sparse(pattern, over)
    device, scales = torch.device("cpu"), over.head_scales(2)
    marks = ragged_marks._marks(sparse, scales, queries, tokens, device)
    for head, scale in enumerate(scales):
        assert ragged_marks.refusal(pattern, sparse.points(scale, tokens), queries) is None
        expected = sparse.visible(scale, queries, tokens, device)
        assert expected is not None
        assert torch.equal(kept(marks[head], queries, expected.shape[1]), expected)


@pytest.mark.parametrize("stride", [1, 2, 3, 45, 64, 1000, 4095, 20000])
def test_the_integers_of_long_sequences(stride: int) -> None:
    """Rows of the first, the last and some query between."""
    length = 25000
    marks = ragged_marks._marks(Sparse(Strided(stride)), (1,), length, length, torch.device("cpu"))[0]
    i, j = torch.tensor([0, 12345, length - 1]), torch.arange(length)
    rows = torch.cat([marks[:1, : len(i)], marks[1:, i]])
    assert torch.equal(kept(rows, len(i), length), Strided(stride).allows(i[:, None], j, length))


def test_residue_classes_alone() -> None:
    marks = ragged_marks._head((Residues(7),), torch.arange(60), 60)
    i, j = torch.arange(60)[:, None], torch.arange(60)
    assert torch.equal(kept(marks, 60, 60), (i - j) % 7 == 0)
