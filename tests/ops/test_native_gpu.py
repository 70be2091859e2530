"""The compiled part on a CUDA device: the bits of the Python path, on any stream, captured, and its errors."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from primaldual import MultiheadAttention, Primal, attention, mechanism
from primaldual.kernels import launching
from primaldual.kernels.kept import Kept
from primaldual.kernels.native import layers as compiled
from primaldual.kernels.native import library as native
from primaldual.kernels.native import replay
from primaldual.kernels.projection import unpooled
from primaldual.kernels.ragged import tokens as ragged_tokens
from primaldual.kernels.ragged import work
from primaldual.training.capture import step_graph
from support.battery import relative_error
from support.ragged import adding_up, sweeping

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]
HEADS = 4
SH = mechanism("sh", scales=(4, 1, 2, 1))
PRIMALS = {
    "softmax": mechanism("softmax"),
    "sh": SH,
    "bn": mechanism("bn", beta=0.6),
    "bn-learned": mechanism("bn", learnable=True),
    "bn+sh": mechanism("bn+sh", learnable=True, scales=(4, 1, 2, 1)),
}
LENGTHS = (1, 17, 127, 129, 1000)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    if (library := native.library()) is not None:
        return library
    if reason := native.refusal():
        pytest.skip(reason)
    path: Path = native.build(tmp_path_factory.mktemp("native") / "native.so")
    library = native.load(path)
    assert library.missing() is None
    return library


@pytest.fixture(autouse=True)
def use(built: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """Says whether the compiled part is used; it is, unless told otherwise."""

    def use(it: bool) -> None:
        monkeypatch.setattr(native, "library", lambda: built if it else None)

    use(True)
    yield use
    torch.cuda.synchronize()


Use = Callable[[bool], None]


def tensors(length: int = 129, dim: int = 16, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Queries, keys and values of one projection."""
    packed = torch.randn(2, length, 3, HEADS, dim, device="cuda", dtype=dtype)
    return [x.detach().requires_grad_() for x in packed.permute(2, 0, 3, 1, 4)]


def step(qkv: list[Tensor], primal: Primal, up: Tensor, **others: object) -> list[Tensor]:
    beta = {name: x.cuda().requires_grad_() for name, x in primal.learned(HEADS, qkv[0].shape[-1]).items()}
    torch.manual_seed(3)
    out = attention(*qkv, primal, parameters=beta, impl="ragged", **others)  # type: ignore[arg-type]
    assert isinstance(out, Tensor)
    return [out, *torch.autograd.grad(out, (*qkv, *beta.values()), up)]


def assert_same(use: Use, qkv: list[Tensor], primal: Primal, up: Tensor, **others: object) -> None:
    """To the bit, where sums have one order."""
    results = []
    torch.use_deterministic_algorithms(True)
    try:
        for it in (True, False, True):
            use(it)
            results.append(step(qkv, primal, up, **others))
            assert ("CppNode" in results[-1][0].grad_fn.name()) == it
    finally:
        torch.use_deterministic_algorithms(False)
    for other in results[1:]:
        assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("name", PRIMALS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_the_bits_of_the_python_path(name: str, dtype: torch.dtype, use: Use) -> None:
    for length in LENGTHS:
        qkv = tensors(length, dtype=dtype)
        assert_same(use, qkv, PRIMALS[name], torch.randn_like(qkv[0]))


@pytest.mark.parametrize("dim", [8, 64, 128])
def test_head_dimensions(dim: int, use: Use) -> None:
    qkv = tensors(dim=dim, dtype=torch.float16)
    assert_same(use, qkv, PRIMALS["bn+sh"], torch.randn_like(qkv[0]))


def test_causal(use: Use) -> None:
    for length in LENGTHS:
        qkv = tensors(length)
        assert_same(use, qkv, PRIMALS["softmax"], torch.randn_like(qkv[0]), is_causal=True)


@pytest.mark.parametrize("name", PRIMALS)
def test_dropout(name: str, use: Use) -> None:
    for length in (129, 1000):
        qkv = tensors(length)
        assert_same(use, qkv, PRIMALS[name], torch.randn_like(qkv[0]), dropout_p=0.2)


def test_whole_heads_in_one_sweep(use: Use) -> None:
    qkv = [torch.randn(320, HEADS, 200, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    with sweeping():
        for p in (0.0, 0.1):
            assert_same(use, qkv, SH, torch.randn_like(qkv[0]), dropout_p=p)


@pytest.mark.parametrize("name", ["sh", "bn+sh"])
def test_blocks_that_add_to_dq(name: str, use: Use) -> None:
    """In any order, so that the last bit may differ."""
    for length, p in ((333, 0.0), (334, 0.1)):  # which no other test has taught the compiled part
        qkv = tensors(length, dim=64)
        up, results = torch.randn_like(qkv[0]), []
        with adding_up(64, 128, 8, 2, 0) as launched:
            for it in (True, False, True):
                use(it)
                results.append(step(qkv, PRIMALS[name], up, dropout_p=p))
                assert ("CppNode" in results[-1][0].grad_fn.name()) == it
        assert launched.count("finish_dq") == 3  # noted down twice, and by Python
        for other in results[1:]:
            assert torch.equal(results[0][0], other[0])
            for mine, theirs in zip(results[0], other, strict=True):
                size = float(theirs.abs().max())
                torch.testing.assert_close(mine, theirs, rtol=2 * torch.finfo(mine.dtype).eps, atol=1e-3 * size)
                assert mine.stride() == theirs.stride()


def test_gradients_that_lie_otherwise(use: Use) -> None:
    qkv = tensors()
    shape = qkv[0].shape
    made = {"device": "cuda", "dtype": torch.bfloat16}
    odd = torch.randn(qkv[0].numel() + 1, **made)[1:].view(shape)  # not at a multiple of 16 bytes
    for up in (torch.randn((), **made).expand(shape), torch.randn(shape, **made), odd):
        for name in ("sh", "bn+sh"):
            assert_same(use, qkv, PRIMALS[name], up)


def test_inputs_that_lie_otherwise(use: Use) -> None:
    up = torch.randn(2, HEADS, 129, 16, device="cuda", dtype=torch.bfloat16)
    contiguous = [x.detach().contiguous().requires_grad_() for x in tensors()]
    odd = [torch.randn(up.numel() + 1, device="cuda", dtype=up.dtype)[1:].view(up.shape) for _ in range(3)]
    shared = [contiguous[0].detach(), *(x.detach()[:, :1].expand(-1, HEADS, -1, -1) for x in contiguous[1:])]
    for qkv in (contiguous, odd, shared):
        assert_same(use, [x.detach().requires_grad_() for x in qkv], SH, up)


def test_other_lengths_of_keys(use: Use) -> None:
    q, (_, k, v) = tensors(127)[0], tensors(200)
    assert_same(use, [q, k, v], SH, torch.randn_like(q))


def test_an_empty_batch() -> None:
    qkv = [x[:0] for x in tensors()]
    out = attention(*qkv, SH, impl="ragged")
    assert out.shape == (0, HEADS, 129, 16)
    assert all(g.shape == out.shape for g in torch.autograd.grad(out.sum(), qkv))


def test_without_gradients(use: Use) -> None:
    qkv = tensors()
    with torch.no_grad():
        outs = []
        for it in (True, False):
            use(it)
            outs.append(attention(*qkv, SH, impl="ragged"))
    assert torch.equal(*outs)
    assert outs[0].grad_fn is None


def test_on_a_side_stream(use: Use) -> None:
    """The step waits for a slow product on its stream, and not on the default one."""
    qkv, up = tensors(), torch.randn(2, HEADS, 129, 16, device="cuda", dtype=torch.bfloat16)
    expected = step(qkv, SH, up)
    big, side = torch.randn(8192, 8192, device="cuda"), torch.cuda.Stream()
    leaves = [torch.zeros_like(x).requires_grad_() for x in qkv]
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(3):
            big = big @ big
        with torch.no_grad():
            for leaf, x in zip(leaves, qkv, strict=True):
                leaf.copy_(x)
        found = step(leaves, SH, up)
    side.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("name", ["sh", "bn+sh"])
def test_a_captured_step_equals_the_eager_one(name: str, use: Use) -> None:
    qkv, primal = tensors(), PRIMALS[name]
    beta = {n: x.cuda().requires_grad_() for n, x in primal.learned(HEADS, 16).items()}

    def run() -> tuple[Tensor, ...]:
        out = attention(*qkv, primal, parameters=beta, impl="ragged")
        return out, *torch.autograd.grad(out.float().square().sum(), (*qkv, *beta.values()))

    graph, results = step_graph(run)
    with torch.no_grad():
        for x in qkv:
            x.copy_(torch.randn_like(x))
    graph.replay()
    for it in (True, False):
        use(it)
        assert all(torch.equal(a, b) for a, b in zip(results, run(), strict=True))


@pytest.mark.parametrize("name", ["sh", "bn+sh"])
def test_a_captured_step_replays_the_same_after_200_other_shapes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays, launches and tables have little room, and what they leave is written over."""
    monkeypatch.setattr(replay, "MOST", 20)
    monkeypatch.setattr(launching, "_ready", Kept(20))
    monkeypatch.setattr(work.work.kept, "most", 20)
    primal = PRIMALS[name]
    beta = {n: x.cuda().requires_grad_() for n, x in primal.learned(HEADS, 16).items()}

    def run(qkv: list[Tensor]) -> tuple[Tensor, ...]:
        out = attention(*qkv, primal, parameters=beta, impl="ragged")
        return out, *torch.autograd.grad(out.float().square().sum(), (*qkv, *beta.values()))

    qkv = tensors()
    expected = [x.detach().clone() for x in run(qkv)]
    graph, results = step_graph(lambda: run(qkv))
    for length in range(200, 400):
        run(tensors(length))
    over = [torch.full((1 << n,), -1, dtype=torch.int32, device="cuda") for n in range(4, 22)]
    for x in results:
        x.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert over
    assert all(torch.equal(mine, other) for mine, other in zip(results, expected, strict=True))
    assert len(replay._held) < 200


def test_training_in_a_loop_equals_python(use: Use) -> None:
    """Memory is given back and taken again many times, in both passes."""
    ends = []
    for it in (True, False):
        use(it)
        torch.manual_seed(0)
        weight = torch.randn(3 * HEADS * 16, HEADS * 16, device="cuda").mul_(0.1).bfloat16().requires_grad_()
        x = torch.randn(8, 100, HEADS * 16, device="cuda", dtype=torch.bfloat16)
        for _ in range(50):
            q, k, v = (x @ weight.T).view(8, 100, 3, HEADS, 16).permute(2, 0, 3, 1, 4)
            out = attention(q, k, v, SH, impl="ragged", dropout_p=0.1).transpose(1, 2).flatten(2)
            (grad,) = torch.autograd.grad((out - x).float().square().mean(), weight)
            weight = (weight.detach() - 0.1 * grad).requires_grad_()
        ends.append(weight)
    assert torch.equal(*ends)


def test_what_was_saved_must_not_be_written_to() -> None:
    qkv = tensors()
    q = qkv[0].clone()
    out = attention(q, *qkv[1:], SH, impl="ragged")
    with torch.no_grad():
        q.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), qkv[0])


def test_differentiated_once() -> None:
    qkv = tensors()
    out = attention(*qkv, SH, impl="ragged")
    with pytest.raises(RuntimeError, match="differentiated only once"):
        torch.autograd.grad(out.square().sum(), qkv[0], create_graph=True)


def test_checkpointed_and_kept_on_the_host() -> None:
    qkv = tensors()
    up = torch.randn_like(qkv[0])
    expected = step(qkv, SH, up)[1:]

    def attend(*qkv: Tensor) -> Tensor:
        return attention(*qkv, SH, impl="ragged")  # type: ignore[return-value]

    again = torch.utils.checkpoint.checkpoint(attend, *qkv, use_reentrant=False)
    assert all(torch.equal(a, b) for a, b in zip(expected, torch.autograd.grad(again, qkv, up), strict=True))
    with torch.autograd.graph.save_on_cpu():
        out = attend(*qkv)
    assert all(torch.equal(a, b) for a, b in zip(expected, torch.autograd.grad(out, qkv, up), strict=True))


LAYERS = {
    "bn": mechanism("bn", beta=0.6),
    "bn, learned": mechanism("bn", learnable=True),
    "sh": mechanism("sh", scales=(1, 1, 2, 4)),
    "bn+sh": mechanism("bn+sh", scales=(1, 1, 2, 4)),
    "bn+sh, learned, apart": mechanism("bn+sh", learnable=True, scales=(3, 1, 3, 2)),
    "all pooled": mechanism("bn+sh", scales=(2, 2, 4, 4)),
}


def make_layer(name: str, **options: object) -> MultiheadAttention:
    torch.manual_seed(0)
    made = {"device": "cuda", "dtype": torch.bfloat16}
    layer = MultiheadAttention(64 * HEADS, HEADS, batch_first=True, mechanism=LAYERS[name], **made, **options)  # type: ignore[arg-type]
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, mean=0.01, std=0.06)
    return layer


def layer_step(layer: MultiheadAttention, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    out = layer(x, x, x, need_weights=False)[0]
    up = torch.linspace(-1, 1, out.numel(), device="cuda", dtype=out.dtype).view(out.shape)
    return [out, *torch.autograd.grad(out, [x, *layer.parameters()], up)]


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the compiled part was used, for every call of a layer."""
    used: list[bool] = []
    real = compiled.attend

    def attend(*given: object, **options: object) -> Tensor | None:
        out = real(*given, **options)  # type: ignore[arg-type]
        used.append(out is not None)
        return out

    monkeypatch.setattr(compiled, "attend", attend)
    return used


@pytest.mark.parametrize("way", ["unpooled", "grouped"])
@pytest.mark.parametrize("length", [1, 17, 128, 1000, 2048])
@pytest.mark.parametrize("name", [name for name in LAYERS if not name.startswith("bn,") and name != "bn"])
def test_layers_with_scaled_heads_have_the_bits_of_the_python_path(
    name: str, length: int, way: str, use: Use, nodes: list[bool]
) -> None:
    layer = make_layer(name)
    layer.impl = way
    x = torch.randn(2, length, 64 * HEADS, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    results = []
    for it in (True, False, True):
        use(it)
        results.append(layer_step(layer, x))
    assert nodes == [True, False, True]
    for other in results[1:]:
        assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("name", ["bn", "bn, learned"])
def test_re_centred_layers_have_the_bits_of_the_python_path(
    name: str, nodes: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_python(*given: Any, pool_first: bool) -> Tensor:
        *projection, dropout_p, seed = given
        return ragged_tokens.attend_tokens(*unpooled.project(*projection), None, (1,) * HEADS, False, dropout_p, seed)

    layer = make_layer(name)
    layer.impl = "unpooled"
    for length in (1, 17, 128, 1000, 2048):
        x = torch.randn(2, length, 64 * HEADS, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        mine = layer_step(layer, x)
        with monkeypatch.context() as patch:
            patch.setattr(compiled, "attend", in_python)
            other = layer_step(layer, x)
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
    assert nodes == [True] * 5


@pytest.mark.parametrize("name", ["bn", "bn, learned"])
def test_re_centred_layers_with_cudnns_attention(name: str, use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other bits than the Python path's, which adds up in another order, and the same error against float64."""
    layer = make_layer(name)
    layer.impl = "recentred_projection"
    exact = copy.deepcopy(layer).double()
    exact.impl = "reference"
    for length in (17, 128, 1000, 1024, 2048):
        x = torch.randn(2, length, 64 * HEADS, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        truth = layer_step(exact, x.detach().double().requires_grad_())
        errors = []
        for it in (True, False):
            use(it)
            found = layer_step(layer, x)
            errors.append([relative_error(a, b) for a, b in zip(found, truth, strict=True)])
        for mine, other in zip(*errors, strict=True):
            assert mine < 2 * other + 8 * torch.finfo(torch.bfloat16).eps
        use(True)
        with torch.no_grad(), monkeypatch.context() as patch:
            patch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
            off = layer(x, x, x, need_weights=False)[0]
        assert relative_error(off, truth[0]) < 2 * errors[1][0] + 8 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("way", ["unpooled", "grouped"])
def test_layers_train_as_in_python(way: str, use: Use) -> None:
    """With dropout; memory is given back and taken again, and parameters change in place."""
    ends = []
    for it in (True, False):
        use(it)
        layer = make_layer("bn+sh, learned, apart", dropout=0.1)
        layer.impl = way
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        torch.manual_seed(2)
        x = torch.randn(4, 333, 64 * HEADS, device="cuda", dtype=torch.bfloat16)
        for _ in range(30):
            optimizer.zero_grad()
            (layer(x, x, x, need_weights=False)[0] - x).float().square().mean().backward()
            optimizer.step()
        ends.append(list(layer.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_a_layer_under_autocast(use: Use, nodes: list[bool]) -> None:
    results = []
    for it in (True, False):
        use(it)
        layer = make_layer("bn+sh").float()
        layer.impl = "unpooled"  # the plan may choose another route for each
        x = torch.randn(2, 129, 64 * HEADS, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
        with torch.autocast("cuda", dtype=torch.bfloat16):
            results.append(layer_step(layer, x.requires_grad_()))
    assert nodes == [True, False]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", ["bn", "sh", "bn+sh, learned, apart"])
def test_layers_whose_batch_comes_second(name: str, nodes: list[bool]) -> None:
    layer = make_layer(name)
    x = torch.randn(3, 200, 64 * HEADS, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    first = layer_step(layer, x)
    layer.batch_first = False
    torch.manual_seed(1)
    y = x.detach().transpose(0, 1).requires_grad_()
    second = layer(y, y, y, need_weights=False)[0]
    assert nodes == [True, True]
    assert torch.equal(second.transpose(0, 1), first[0])
    up = torch.linspace(-1, 1, x.numel(), device="cuda", dtype=x.dtype).view(x.shape).transpose(0, 1)
    assert torch.equal(torch.autograd.grad(second, y, up)[0].transpose(0, 1), first[1])
