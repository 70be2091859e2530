"""The ragged kernels on a CUDA device: every dtype, long sequences, captured and compiled."""

import pytest
import torch

from primaldual import Primal, attention, mechanism
from primaldual.kernels.native import library as native
from primaldual.ops import plan
from primaldual.primal import Fixed, Pattern, Strided, Window
from primaldual.training.capture import step_graph
from support.ragged import adding_up, check, replayed, sweeping

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("full_precision"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]

LENGTHS = (1, 17, 127, 129, 1000, 4097)
UNSORTED = mechanism("bn+sh", learnable=True, scales=(4, 1, 2, 1))
SOFTMAX = mechanism("softmax")
HEADS = 4
CUDA = {"heads": HEADS, "device": "cuda"}
# kernels are compiled for a dtype and a kind of length (1, one block, several): a few of each tell
DTYPES = [(torch.bfloat16, n) for n in LENGTHS]
DTYPES += [(torch.float32, n) for n in LENGTHS]
DTYPES += [(torch.float16, n) for n in (129, 4097)]


@pytest.fixture(autouse=True)
def by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled part has tests of its own, and would keep to the shapes of blocks that it learned first."""
    monkeypatch.setattr(native, "library", lambda: None)


def tensors(length: int = 129, dim: int = 16, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.randn(2, HEADS, length, dim, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("length", [1, 9, 16, 17, 33])
def test_few_queries_of_wide_heads(length: int, dim: int) -> None:
    """Blocks of 16 and 32 queries, whose product with the keys, where turned over, read beyond its memory."""
    check(UNSORTED, (length, length, dim, dim), torch.bfloat16, **CUDA)


@pytest.mark.parametrize(("dtype", "length"), DTYPES, ids=lambda x: str(x).removeprefix("torch."))
def test_odd_lengths(dtype: torch.dtype, length: int) -> None:
    check(UNSORTED, (length, length, 16, 16), dtype, **CUDA)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
def test_masks(is_causal: bool, dtype: torch.dtype) -> None:
    for mask in ("padding", "bias"):
        for shape in ((129, 129, 16, 16), (127, 1000, 16, 16), (1000, 127, 16, 16)):
            check(UNSORTED, shape, dtype, mask=mask, is_causal=is_causal, batch=2, **CUDA)


@pytest.mark.parametrize("primal", [SOFTMAX, UNSORTED], ids=["softmax", "bn+sh"])
def test_long_causal_sequences(primal: Primal) -> None:
    check(primal, (1000, 1000, 16, 16), torch.bfloat16, is_causal=True, **CUDA)
    # the reference holds a training set for every causal query
    check(primal, (4097, 4097, 16, 16), torch.bfloat16, is_causal=True, dense="sdpa", **CUDA)


@pytest.mark.parametrize("shape", [(129, 129, 64, 64), (129, 127, 128, 128), (127, 129, 24, 40)], ids=str)
def test_head_dimensions(shape: tuple[int, int, int, int]) -> None:
    check(UNSORTED, shape, torch.bfloat16, **CUDA)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [16, 64, 128])
def test_means_over_windows_in_many_blocks(dim: int, dtype: torch.dtype) -> None:
    for scales in ((8, 1, 2, 3), (300, 1, 2, 1)):
        check(mechanism("bn+sh", scales=scales), (1000, 1000, dim, dim), dtype, **CUDA)


def test_float32_products_may_be_rounded_to_tf32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    check(UNSORTED, (1000, 1000, 16, 16), torch.float32, eps=2.0**-10, **CUDA)


@pytest.mark.parametrize(
    ("primal", "p", "others"),
    [(UNSORTED, 0.1, {}), (UNSORTED, 0.6, {"is_causal": True}), (SOFTMAX, 0.1, {"mask": "padding", "batch": 2})],
    ids=["tokens", "causal", "padding"],
)
def test_dropout_drops_what_the_hash_says(primal: Primal, p: float, others: dict) -> None:
    with replayed(primal, HEADS, -123456789, others.get("is_causal", False)):
        for length in (129, 1000):
            check(primal, (length, length, 16, 16), torch.bfloat16, dropout_p=p, **others, **CUDA)


def test_any_strides() -> None:
    packed = torch.randn(2, 129, 3, HEADS, 16, device="cuda", dtype=torch.bfloat16)
    views = [x.detach().requires_grad_() for x in packed.permute(2, 0, 3, 1, 4)]
    copies = [x.detach().contiguous().requires_grad_() for x in views]
    for is_causal in (False, True):
        results = []
        for qkv in (views, copies):
            out = attention(*qkv, UNSORTED, is_causal=is_causal, impl="ragged")
            results.append((out, *torch.autograd.grad(out.sum(), qkv)))  # an expanded gradient
        for mine, other in zip(*results, strict=True):
            torch.testing.assert_close(mine, other, rtol=0.02, atol=0.02)


def test_an_empty_batch() -> None:
    q, k, v = (x[:0] for x in tensors())
    out = attention(q, k, v, UNSORTED, impl="ragged")
    assert out.shape == (0, HEADS, 129, 16)
    assert all(g.shape == out.shape for g in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("kind", ["all", "causal", "padded"])
def test_a_captured_step_equals_the_eager_one(kind: str) -> None:
    qkv = tensors()
    hidden = torch.rand(2, 129, device="cuda") < 0.3 if kind == "padded" else None

    def step() -> tuple[torch.Tensor, ...]:
        out = attention(*qkv, UNSORTED, is_causal=kind == "causal", key_padding_mask=hidden, impl="ragged")
        return out, *torch.autograd.grad(out.float().square().sum(), qkv)

    graph, results = step_graph(step)
    with torch.no_grad():
        for x in qkv:
            x.copy_(torch.randn_like(x))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(results, step(), strict=True))


def test_every_replay_drops_other_weights() -> None:
    qkv, p, replays = tensors(), 0.1, 400

    def step() -> tuple[torch.Tensor, ...]:
        out = attention(*qkv, UNSORTED, dropout_p=p, impl="ragged")
        return out, *torch.autograd.grad(out.float().square().sum(), qkv)

    graph, (out, *gradients) = step_graph(step)
    outs = []
    for _ in range(replays):
        graph.replay()
        outs.append(out.double())
        assert all(x.isfinite().all() for x in (out, *gradients))
    outs = torch.stack(outs)
    assert len({float(x.sum()) for x in outs}) == replays
    exact = attention(*qkv, UNSORTED, impl="ragged").double()
    bound = 6 * outs.std(0) / replays**0.5 + torch.finfo(out.dtype).eps * exact.abs().clamp(min=1)
    assert ((outs.mean(0) - exact).abs() < bound).all()


def test_compiles_into_one_graph_with_inductor() -> None:
    leaves = [*tensors(), torch.rand(HEADS, device="cuda", requires_grad=True)]
    hidden = torch.rand(2, 129, device="cuda") < 0.3

    def attend(q, k, v, beta):
        both = attention(q, k, v, UNSORTED, parameters={"beta": beta}, impl="ragged")
        return both + attention(q, k, v, UNSORTED, parameters={"beta": beta}, key_padding_mask=hidden, impl="ragged")

    results = []
    for call in (attend, torch.compile(attend, fullgraph=True)):
        out = call(*leaves)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), leaves)))
    for mine, other in zip(*results, strict=True):  # the compiler rounds in other places
        scale = float(mine.abs().max().clamp(min=1))
        torch.testing.assert_close(other, mine, rtol=0, atol=8 * torch.finfo(torch.bfloat16).eps * scale)


@pytest.mark.parametrize("others", [{}, {"is_causal": True}, {"padded": True}], ids=["plain", "causal", "padded"])
def test_autocast_changes_nothing_for_bfloat16_inputs(others: dict) -> None:
    """Its sums would be float32, also those of pooling: the kernels take one dtype."""
    qkv, is_causal = tensors(), others.get("is_causal", False)
    hidden = torch.rand(2, 129, device="cuda") < 0.3 if others.get("padded") else None
    results = []
    for enabled in (False, True):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=enabled):
            out = attention(*qkv, UNSORTED, is_causal=is_causal, key_padding_mask=hidden, impl="ragged")
        assert out.dtype == torch.bfloat16
        results.append((out, *torch.autograd.grad(out.float().square().sum(), qkv)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("mask", ["none", "padding"])
@pytest.mark.parametrize("dim", [8, 16])
@pytest.mark.parametrize("primal", [SOFTMAX, UNSORTED], ids=["softmax", "bn+sh"])
def test_many_heads_are_swept_one_by_one(primal: Primal, dim: int, mask: str) -> None:
    with sweeping():
        for length in (300, 384):
            check(primal, (length, length, dim, dim), torch.bfloat16, mask=mask, batch=160, **CUDA)
    with sweeping(), replayed(primal, HEADS, 77):
        check(primal, (300, 300, dim, dim), torch.bfloat16, mask=mask, batch=160, dropout_p=0.1, **CUDA)


@pytest.mark.parametrize("dim", [16, 64])
def test_scaled_heads_drop_what_the_hash_says(dim: int) -> None:
    primal = mechanism("sh", scales=(1, 2, 4, 8))
    with replayed(primal, HEADS, 5):
        for length in (300, 1152):
            check(primal, (length, length, dim, dim), torch.bfloat16, dropout_p=0.1, batch=2, **CUDA)


def together(dim: int) -> tuple[int, ...]:
    return (64, 64, 4, 2, 0) if dim == 128 else (64, 128, 8, 2, 0)


def finishes_dq(length: int, dim: int) -> bool:
    """Whether some head has more than one block of keys."""
    return length > (128 if dim <= 32 else 64)


@pytest.mark.parametrize("length", [65, 127, 128, 129, 1000, 4097])
@pytest.mark.parametrize("dim", [8, 16, 32, 64, 128])
def test_blocks_of_keys_that_add_to_dq(dim: int, length: int) -> None:
    cases = [(SOFTMAX, torch.bfloat16), (UNSORTED, torch.bfloat16)]
    cases += [(UNSORTED, torch.float16)] if length in (129, 4097) else []
    for primal, dtype in cases:
        with adding_up(*together(dim)) as launched:
            check(primal, (length, length, dim, dim), dtype, **CUDA)
        assert ("finish_dq" in launched) == finishes_dq(length, dim)


@pytest.mark.parametrize(
    "shape",
    [(64, 64, 4, 3, 0), (32, 64, 4, 3, 168), (32, 128, 4, 2, 0), (64, 128, 8, 3, 0), (128, 128, 8, 2, 0),
     (32, 128, 8, 3, 128), (32, 256, 8, 2, 0), (16, 64, 4, 2, 0)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dim", [16, 64])
def test_shapes_of_blocks_that_add_to_dq(dim: int, shape: tuple[int, ...]) -> None:
    for length in (300, 1024):
        with adding_up(*shape) as launched:
            check(UNSORTED, (length, length, dim, dim), torch.bfloat16, batch=2, **CUDA)
        assert "finish_dq" in launched


@pytest.mark.parametrize("dim", [8, 64])
def test_masks_and_dropout_where_blocks_add_to_dq(dim: int) -> None:
    for primal in (SOFTMAX, UNSORTED):
        for mask in ("none", "padding", "bias"):
            with adding_up(*together(dim)) as launched, replayed(primal, HEADS, 77):
                for shape in ((127, 1000, dim, dim), (1000, 300, dim, 16)):
                    check(primal, shape, torch.bfloat16, mask=mask, batch=2, dropout_p=0.1, **CUDA)
            assert "finish_dq" in launched


@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.parametrize("primal", [SOFTMAX, UNSORTED], ids=["softmax", "bn+sh"])
def test_captured_blocks_that_add_to_dq(primal: Primal, dim: int) -> None:
    """Every replay starts its sums from zero. They have no order, so the last bit of dq may differ."""
    qkv = tensors(300, dim)
    up = torch.randn_like(qkv[0])

    def step() -> tuple[torch.Tensor, ...]:
        out = attention(*qkv, primal, impl="ragged")
        return out, *torch.autograd.grad(out, qkv, up)

    with adding_up(*together(dim)) as launched:
        graph, results = step_graph(step)
        with torch.no_grad():
            for x in qkv:
                x.copy_(torch.randn_like(x))
        expected = step()
        for _ in range(5):
            graph.replay()
            assert torch.equal(results[0], expected[0])
            for mine, other in zip(results, expected, strict=True):
                assert_bits_but_the_last(mine, other)
    assert "finish_dq" in launched


def assert_bits_but_the_last(mine: torch.Tensor, other: torch.Tensor) -> None:
    size = float(other.abs().max())
    torch.testing.assert_close(mine, other, rtol=2 * torch.finfo(mine.dtype).eps, atol=1e-3 * size)


def test_sums_have_one_order_where_torch_is_told_so() -> None:
    qkv = tensors(1000, 64)
    up = torch.randn_like(qkv[0])
    torch.use_deterministic_algorithms(True)
    try:
        with adding_up(*together(64)) as launched:
            results = [torch.autograd.grad(attention(*qkv, SOFTMAX, impl="ragged"), qkv, up) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert "finish_dq" not in launched
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_strided_queries_where_blocks_add_to_dq() -> None:
    packed = torch.randn(2, 300, 3, HEADS, 64, device="cuda", dtype=torch.bfloat16)
    views = [x.detach().requires_grad_() for x in packed.permute(2, 0, 3, 1, 4)]
    copies = [x.detach().contiguous().requires_grad_() for x in views]
    results = []
    with adding_up(*together(64)) as launched:
        for qkv in (views, copies):
            out = attention(*qkv, mechanism("sh", scales=(4, 1, 2, 1)), impl="ragged")
            results.append((out, *torch.autograd.grad(out.sum(), qkv)))  # an expanded gradient
    assert "finish_dq" in launched
    for mine, other in zip(*results, strict=True):
        assert_bits_but_the_last(mine, other)


PATTERNS = [Strided(None), Fixed(None, 2), Window(None)]


def sparse(name: str, pattern: Pattern) -> Primal:
    return mechanism(name, pattern=pattern, **({"scales": (4, 1, 2, 1)} if "sh" in name else {}))


@pytest.mark.parametrize("dim", [8, 16, 64])
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: type(pattern).__name__)
@pytest.mark.parametrize("name", ["sparse", "sparse-bn", "sparse-sh", "sparse-bn+sh"])
def test_sparse_heads(name: str, pattern: Pattern, dim: int) -> None:
    primal = sparse(name, pattern)
    for length in (17, 127, 129, 1000):
        for mask in ("none", "padding"):
            check(primal, (length, length, dim, dim), torch.bfloat16, mask=mask, batch=2, **CUDA)
            with replayed(primal, HEADS, -5):
                check(primal, (length, length, dim, dim), torch.bfloat16, mask=mask, batch=2, dropout_p=0.1, **CUDA)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: type(pattern).__name__)
def test_sparse_heads_of_other_dtypes_and_shapes(pattern: Pattern, dtype: torch.dtype) -> None:
    primal = sparse("sparse-bn+sh", pattern)
    for shape in ((129, 1000, 16, 16), (1000, 127, 32, 24), (300, 300, 128, 128)):
        check(primal, shape, dtype, mask="bias", batch=2, **CUDA)


@pytest.mark.parametrize("dim", [8, 16])
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: type(pattern).__name__)
def test_sparse_heads_are_swept_and_added_up(pattern: Pattern, dim: int) -> None:
    primal = sparse("sparse-bn+sh", pattern)
    for way in (sweeping, lambda: adding_up(*together(dim))):
        for length in (300, 384):
            with way(), replayed(primal, HEADS, 77):
                check(primal, (length, length, dim, dim), torch.bfloat16, batch=160, dropout_p=0.1, **CUDA)


@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize("dim", [16, 64])
def test_a_captured_sparse_step_equals_the_eager_one(dim: int, padded: bool) -> None:
    qkv, primal = tensors(129, dim), sparse("sparse-bn+sh", Strided(None))
    hidden = torch.rand(2, 129, device="cuda") < 0.3 if padded else None

    def step() -> tuple[torch.Tensor, ...]:
        out = attention(*qkv, primal, key_padding_mask=hidden, impl="ragged")
        return out, *torch.autograd.grad(out.float().square().sum(), qkv)

    graph, results = step_graph(step)
    with torch.no_grad():
        for x in qkv:
            x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(results[0], step()[0])
    for mine, other in zip(results, step(), strict=True):
        assert_bits_but_the_last(mine, other)


def test_sparse_heads_compile_into_one_graph_with_inductor() -> None:
    leaves, primal = tensors(), sparse("sparse-bn+sh", Strided(None))

    def attend(q, k, v):
        return attention(q, k, v, primal, impl="ragged")

    results = []
    for call in (attend, torch.compile(attend, fullgraph=True)):
        out = call(*leaves)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), leaves)))
    for mine, other in zip(*results, strict=True):
        scale = float(mine.abs().max().clamp(min=1))
        torch.testing.assert_close(other, mine, rtol=0, atol=8 * torch.finfo(torch.bfloat16).eps * scale)


@pytest.mark.parametrize("name", ["sparse", "sparse-bn+sh"])
def test_sparse_heads_with_dropout_are_ours(name: str) -> None:
    q, k, v = tensors(1000)
    primal = sparse(name, Strided(None))
    with torch.cuda.stream(torch.cuda.Stream()):  # as captured: in eager mode work so small is the host's
        chosen = plan(q, k, v, primal, dropout_p=0.1)
    assert chosen.impl == "ragged"
