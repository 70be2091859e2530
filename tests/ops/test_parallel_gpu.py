"""Long scaled heads, which go back through cuDNN's kernels beside ours; and whole training steps in a CUDA graph."""

import pytest
import torch
from torch import nn

from primaldual import Primal, attention, mechanism
from primaldual.kernels.cudnn import attention as cudnn
from primaldual.kernels.cudnn import beside as parallel
from primaldual.kernels.cudnn import causal
from primaldual.nn import TransformerEncoderLayer
from primaldual.training.capture import step_graph
from support.battery import relative_error
from support.ragged import check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]

SCALES = (1, 1, 2, 4)
PRIMALS = {
    "sh": mechanism("sh", scales=SCALES),
    "bn+sh": mechanism("bn+sh", scales=SCALES),
    "bn+sh half": mechanism("bn+sh", beta=0.5, scales=SCALES),
    "bn+sh learned": mechanism("bn+sh", learnable=True, scales=SCALES),
}


@pytest.fixture
def calls(monkeypatch) -> list:
    """How many points heads have whose gradients cuDNN finds; here all that are not few, at any length."""
    seen, by_cudnn = [], parallel.by_cudnn
    for name, value in (("QUERIES", 1), ("POINTS", 50), ("NARROW", 8)):
        monkeypatch.setattr(parallel, name, value)
    monkeypatch.setattr(parallel, "by_cudnn", lambda *given: (seen.append(given[2].shape[2]), by_cudnn(*given))[1])
    return seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PRIMALS)
def test_equals_the_reference(name: str, dtype: torch.dtype, calls: list) -> None:
    for shape in ((512, 512, 16, 16), (100, 60, 64, 64), (1000, 1000, 16, 16), (200, 192, 64, 64)):
        check(PRIMALS[name], shape, dtype, impl="mixed", heads=len(SCALES), batch=2, device="cuda")
    assert calls == [512, 256, 128, 60, 1000, 500, 250, 96]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_causal_heads_equal_the_reference(dtype: torch.dtype, monkeypatch) -> None:
    monkeypatch.setattr(causal, "QUERIES", 1)
    monkeypatch.setattr(parallel, "NARROW", 8)
    for length, dim in ((256, 64), (100, 16), (513, 128)):
        shape, heads = (length, length, dim, dim), len(SCALES)
        check(PRIMALS["sh"], shape, dtype, impl="mixed", heads=heads, batch=2, device="cuda", is_causal=True)


def test_captured_causal_heads_are_those_of_the_eager_call() -> None:
    q, k, v = (torch.randn(2, 4, 1024, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    step = lambda: torch.autograd.grad(  # noqa: E731
        attention(q, k, v, PRIMALS["sh"], is_causal=True, impl="mixed").float().square().sum(), (q, k, v)
    )
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        expected = [step() for _ in range(2)][-1]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    assert all(relative_error(a, b) < ROUNDING for a, b in zip(found, expected, strict=True))


def tensors(length: int = 120) -> list[torch.Tensor]:
    shape = (2, len(SCALES), length, 16)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]


ROUNDING = 6 * 2**-8
"""Of two ways that each round weights, their gradients and results to bfloat16."""


def apart(leaves: list[torch.Tensor], primal: Primal) -> float:
    """How far outputs and gradients with cuDNN's backward pass are from those by our kernels alone, by norms."""
    learned = {n: x.cuda().requires_grad_() for n, x in primal.learned(leaves[0].shape[1], leaves[0].shape[-1]).items()}
    up, found = torch.randn_like(leaves[0]), []
    for impl in ("mixed", "ragged"):
        out = attention(*leaves, primal, parameters=learned, impl=impl)
        found.append([out, *torch.autograd.grad(out, [*leaves, *learned.values()], up)])
    return max(float((x.float() - y.float()).norm() / y.float().norm()) for x, y in zip(*found, strict=True))


@pytest.mark.parametrize("name", ["sh", "bn+sh learned"])
def test_a_long_sequence_gets_what_our_kernels_give(name: str) -> None:
    """By the rule as it is: at 4096 two of the three scales."""
    leaves = [torch.randn(2, 4, 4096, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    assert apart(leaves, PRIMALS[name]) < 0.01


def test_scores_of_hundreds_find_their_log_sum_exp(calls: list) -> None:
    """Queries are rounded after the shift, for cuDNN as in our forward pass: else gradients are off by 0.2 and more."""
    q, k, v = tensors(240)
    leaves = [x.detach().requires_grad_() for x in (8 * q + 24, 8 * k + 24, v)]
    assert apart(leaves, PRIMALS["bn+sh"]) < 0.1
    assert calls == [240, 120, 60]


@pytest.mark.parametrize("name", PRIMALS)
def test_a_captured_step_equals_the_eager_one(name: str, calls: list) -> None:
    leaves = tensors()
    learned = {n: x.cuda().requires_grad_() for n, x in PRIMALS[name].learned(len(SCALES), 16).items()}
    leaves += learned.values()

    def step() -> tuple[torch.Tensor, ...]:
        out = attention(*leaves[:3], PRIMALS[name], parameters=learned, impl="mixed")
        return out, *torch.autograd.grad(out.float().square().sum(), leaves)

    graph, results = step_graph(step)
    with torch.no_grad():
        for x in leaves[:3]:
            x.copy_(torch.randn_like(x))
    for _ in range(3):
        graph.replay()
    for mine, other in zip(results, step(), strict=True):  # cuDNN adds dq up in any order
        scale = float(other.abs().max().clamp(min=1))
        torch.testing.assert_close(mine, other, rtol=0, atol=4 * torch.finfo(torch.bfloat16).eps * scale)
    assert calls == [120, 60] * 5


def test_every_replay_drops_other_weights() -> None:
    """Group by group, by torch's kernels alone."""
    qkv, replays = tensors(), 400

    def step() -> tuple[torch.Tensor, ...]:
        out = attention(*qkv, PRIMALS["bn+sh"], dropout_p=0.1, impl="sdpa")
        return out, *torch.autograd.grad(out.float().square().sum(), qkv)

    graph, (out, *gradients) = step_graph(step)
    outs = []
    for _ in range(replays):
        graph.replay()
        outs.append(out.double())
        assert all(x.isfinite().all() for x in (out, *gradients))
    outs = torch.stack(outs)
    assert len({float(x.sum()) for x in outs}) == replays
    exact = attention(*qkv, PRIMALS["bn+sh"], impl="reference").double()
    bound = 6 * outs.std(0) / replays**0.5 + 2 * torch.finfo(out.dtype).eps * exact.abs().clamp(min=1)
    assert ((outs.mean(0) - exact).abs() < bound).all()


@pytest.mark.parametrize("impl", ["sdpa", "ragged"])
@pytest.mark.parametrize("name", ["sh", "bn+sh"])
def test_views_of_one_projection_stay_finite_with_dropout(name: str, impl: str) -> None:
    """As in a training step of 1152 tokens: packed projections, wide heads, captured, many replays."""
    packed = torch.randn(16, 1152, 3, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    up = torch.randn(16, 1152, 4, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

    def step() -> tuple[torch.Tensor, ...]:
        q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
        out = attention(q, k, v, PRIMALS[name], dropout_p=0.1, impl=impl)
        return out, *torch.autograd.grad(out, packed, up)

    graph, (out, gradient) = step_graph(step)
    largest = 0.0
    for _ in range(50):
        graph.replay()
        assert out.isfinite().all() and gradient.isfinite().all()
        largest = max(largest, float(gradient.abs().max()))
    q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
    (exact,) = torch.autograd.grad(attention(q, k, v, PRIMALS[name], impl="sdpa"), packed, up)
    assert largest < 10 * float(exact.abs().max())


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("length", [896, 1152], ids=lambda n: f"{n} and {n // 2} keys")
@pytest.mark.parametrize("impl", ["sdpa", "mixed", "ragged", "auto"])
def test_scores_far_below_zero_have_finite_gradients(impl: str, length: int, dropout_p: float, calls: list) -> None:
    """Half of 896, or of 1152, is an odd multiple of 64: there cuDNN does not hide what is beyond the last key."""
    if impl == "mixed" and dropout_p:
        pytest.skip("refused: what cuDNN drops cannot be looked at")
    primal = mechanism("sh", scales=SCALES)
    far = torch.full((16,), 8.0, device="cuda")  # scores near -256
    inputs = [sign * far + 0.1 * torch.randn(2, len(SCALES), length, 16, device="cuda") for sign in (1, -1, 0)]
    leaves = [x.bfloat16().requires_grad_() for x in inputs]
    out = attention(*leaves, primal, impl=impl, dropout_p=dropout_p)
    for x in (out, *torch.autograd.grad(out.float().square().sum(), leaves)):
        assert x.isfinite().all()
    assert not any(cudnn.wrong_gradients(points) for points in calls)


@pytest.mark.parametrize("first", [0, 1, 2], ids=["heads first", "tokens first", "torch's own"])
def test_calls_that_differ_in_the_strides_of_their_outputs_alone(first: int, calls: list) -> None:
    """torch keeps cuDNN's plans by the strides of q, k and v alone; two heads over half the keys are in all of these.

    Each comes first once, at a length of its own.
    """
    length = 200 + 40 * first

    def draw(heads: int, tokens: int, tokens_first: bool = False) -> torch.Tensor:
        x = torch.randn(2, heads, tokens, 16, device="cuda", dtype=torch.bfloat16)
        return (x.transpose(1, 2).contiguous().transpose(1, 2) if tokens_first else x).requires_grad_()

    plain = mechanism("softmax")
    ways = [
        (mechanism("sh", scales=(1, 1, 1, 1, 2, 2)), [draw(6, length) for _ in range(3)]),
        (mechanism("sh", scales=(1, 1, 2, 2)), [draw(4, length, tokens_first=True) for _ in range(3)]),
        (plain, [draw(6, length)[:, 4:], draw(2, length // 2), draw(2, length // 2)]),
    ]
    for primal, qkv in ways[first:] + ways[:first]:
        out = attention(*qkv, primal, impl="sdpa" if primal is plain else "mixed")
        ups = [torch.randn_like(out)]
        if primal is not plain:  # torch itself runs gradients of other strides by the plan of the first
            ups += [
                torch.randn_like(out).contiguous(),
                torch.randn_like(out.transpose(1, 2).contiguous()).transpose(1, 2),
            ]
        exact = [x.detach().double().requires_grad_() for x in qkv]
        truth = attention(*exact, primal, impl="reference")
        for up in ups:
            found = torch.autograd.grad(out, qkv, up, retain_graph=True)
            expected = torch.autograd.grad(truth, exact, up.double(), retain_graph=True)
            assert all(relative_error(x, y) < 0.05 for x, y in zip(found, expected, strict=True))
    assert calls == 3 * [length, length // 2] * 2


@pytest.mark.parametrize("first", [True, False], ids=["a third first", "whole rows first"])
def test_queries_that_lie_alike_before_different_outputs(first: bool, calls: list, monkeypatch) -> None:
    """A third of a projection, and a tensor of its own with three times as many heads, whose rows are as long.

    Each comes first once, at a length of its own.
    """
    length, place, copies = 360 + 16 * first, cudnn.place, []
    monkeypatch.setattr(cudnn, "place", lambda x, *more, **others: (copies.append(x), place(x, *more, **others)))
    for packed, expected in (first, 0), (not first, 2), (first, 0):
        parts = torch.randn(3, 2, length, 12, 16, device="cuda", dtype=torch.bfloat16).unbind(0)
        if packed:
            parts = parts[0].unflatten(2, (3, 4)).unbind(2)
        qkv = [x.transpose(1, 2).requires_grad_() for x in parts]
        assert qkv[0].stride() == (length * 192, 16, 192, 1)
        copies.clear()
        assert apart(qkv, mechanism("sh", scales=(1, 1, 2, 2) + (() if packed else (8,) * 8))) < ROUNDING
        assert len(copies) == expected
    assert calls == 3 * [length, length // 2]


@pytest.mark.parametrize("strided", [False, True], ids=["copied", "as they lie"])
@pytest.mark.parametrize("name", ["sh", "bn+sh"])
def test_log_sum_exps_copied_and_as_they_lie(name: str, strided: bool, calls: list, monkeypatch) -> None:
    """1001 of 4 bytes each are not always at a multiple of 16 bytes."""
    if strided and not cudnn.STRIDED:
        pytest.skip("copied with this torch")
    monkeypatch.setattr(cudnn, "STRIDED", strided)
    for length in (1000, 1001):
        qkv = tensors(1000)
        qkv[0] = torch.randn(2, len(SCALES), length, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        assert apart(qkv, PRIMALS[name]) < ROUNDING
    assert calls == 2 * [1000, 500, 250]


def test_queries_that_cannot_be_read_16_bytes_at_a_time(calls: list, monkeypatch) -> None:
    monkeypatch.setattr(cudnn, "usable", lambda *given: True)
    q, k, v = tensors()
    rest = torch.randn(q.numel() + 1, device="cuda", dtype=q.dtype)[1:].view(q.shape)
    narrow = torch.randn(*q.shape[:3], 17, device="cuda", dtype=q.dtype)[..., :16]
    for given in (rest, narrow, rest[:1].expand(2, -1, -1, -1)):
        assert apart([given.detach().requires_grad_(), k, v], PRIMALS["sh"]) < ROUNDING
    assert calls == 3 * [120, 60]


class Training:
    """A small classifier of series, 896 steps long, with heads of 16 dimensions, at bfloat16."""

    def __init__(self, impl: str, dropout: float) -> None:
        torch.manual_seed(0)
        layers = [
            TransformerEncoderLayer(64, 4, 128, dropout, batch_first=True, mechanism=mechanism("bn+sh"), impl=impl)
            for _ in range(2)
        ]
        self.body = nn.Sequential(nn.Linear(3, 64), *layers).cuda()
        self.head = nn.Linear(64, 4).cuda()
        parameters = [*self.body.parameters(), *self.head.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=1e-3, capturable=True)
        self.series = torch.randn(8, 896, 3, device="cuda")
        self.labels = torch.arange(8, device="cuda") % 4
        self.losses: list[torch.Tensor] = []

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
            logits = self.head(self.body(self.series).mean(1))
        loss = nn.functional.cross_entropy(logits.float(), self.labels)
        loss.backward()
        self.optimizer.step()
        loss = loss.detach()
        if not torch.cuda.is_current_stream_capturing():
            self.losses.append(loss)
        return loss

    def eager(self, steps: int) -> torch.Tensor:
        for _ in range(steps):
            self.step()
        return torch.stack(self.losses)

    def replayed(self, steps: int, warmups: int = 3) -> torch.Tensor:
        graph, loss = step_graph(self.step, warmups)
        for _ in range(steps - warmups):
            graph.replay()
            self.losses.append(loss.clone())
        return torch.stack(self.losses)


@pytest.mark.parametrize("impl", ["sdpa", "ragged"])
def test_a_captured_training_with_dropout_stays_finite_and_learns(impl: str) -> None:
    """Pooled heads through torch's fused attention, with dropout and captured, once turned to NaN here."""
    losses = Training(impl, dropout=0.1).replayed(63)
    assert losses.isfinite().all()
    assert losses[-10:].mean() < 0.8 * losses[:10].mean()


@pytest.mark.parametrize("impl", ["sdpa", "ragged"])
def test_a_captured_training_equals_an_eager_one(impl: str) -> None:
    eager, replayed = Training(impl, dropout=0.0).eager(30), Training(impl, dropout=0.0).replayed(30)
    torch.testing.assert_close(replayed[:10], eager[:10], rtol=0.01, atol=0.01)
    torch.testing.assert_close(replayed, eager, rtol=0.1, atol=0.05)  # roundings add up over the steps
