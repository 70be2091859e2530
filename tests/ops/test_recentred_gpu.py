"""Re-centred heads on cuDNN's kernels."""

import pytest
import torch

from primaldual import attention, mechanism
from primaldual.ops import UnsupportedError, recentred
from primaldual.training.capture import step_graph
from support.ragged import check

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]

HEADS = 4
PRIMALS = {
    "bn": mechanism("bn"),
    "half": mechanism("bn", beta=0.5),
    "learned": mechanism("bn", learnable=True),
}


@pytest.fixture
def calls(monkeypatch) -> list:
    """The calls of `recentred`, so that a test knows that it ran."""
    seen, run = [], recentred.run
    monkeypatch.setattr("primaldual.ops._attention._known", {})  # what goes straight to an executor's run
    monkeypatch.setattr(recentred, "run", lambda p: (seen.append(p), run(p))[1])
    return seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PRIMALS)
def test_equals_the_reference(name: str, dtype: torch.dtype, calls: list) -> None:
    shapes = [(length, length, 64, 64) for length in (17, 127, 129, 1000, 4097)]
    shapes += [(300, 60, 16, 16), (60, 1100, 128, 64)]
    for shape in shapes:
        check(PRIMALS[name], shape, dtype, impl="recentred", heads=HEADS, batch=2, device="cuda")
    assert len(calls) == len(shapes)


def tensors(length: int, side_by_side: bool) -> list[torch.Tensor]:
    shape = (2, length, HEADS, 64) if side_by_side else (2, HEADS, length, 64)
    drawn = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    return [(x.transpose(1, 2) if side_by_side else x).requires_grad_() for x in drawn]


@pytest.mark.parametrize("side_by_side", [False, True], ids=["heads", "heads side by side"])
def test_layouts_do_not_matter(side_by_side: bool, calls: list) -> None:
    torch.manual_seed(0)
    leaves = tensors(300, side_by_side)
    up = torch.randn(2, 300, HEADS, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    found = []
    for grad in (up, up.contiguous()):
        out = attention(*leaves, PRIMALS["bn"], impl="recentred")
        found.append((out, *torch.autograd.grad(out, leaves, grad)))
    wide = [x.detach().double().requires_grad_() for x in leaves]
    out = attention(*wide, PRIMALS["bn"], impl="reference")
    truth = (out, *torch.autograd.grad(out, wide, up.double()))
    for mine in found:
        for x, y in zip(mine, truth, strict=True):
            assert (x.double() - y).norm() <= 2e-2 * y.norm()
    assert len(calls) == 2


@pytest.mark.parametrize("name", PRIMALS)
def test_a_captured_step_equals_the_eager_one(name: str, calls: list) -> None:
    leaves = tensors(200, False)
    learned = {n: x.cuda().requires_grad_() for n, x in PRIMALS[name].learned(HEADS, 64).items()}
    leaves += learned.values()

    def step() -> tuple[torch.Tensor, ...]:
        out = attention(*leaves[:3], PRIMALS[name], parameters=learned, impl="recentred")
        return out, *torch.autograd.grad(out.float().square().sum(), leaves)

    graph, results = step_graph(step)
    with torch.no_grad():
        for x in leaves[:3]:
            x.copy_(torch.randn_like(x))
    graph.replay()
    for captured, eager in zip(results, step(), strict=True):
        assert (captured.double() - eager.double()).norm() <= 1e-2 * eager.double().norm()
    assert calls


def test_what_is_left_to_others() -> None:
    hidden = torch.zeros(2, 128, dtype=torch.bool, device="cuda")
    plain, half_a_block = tensors(128, False), tensors(192, False)  # see `cudnn.wrong_gradients`
    for qkv, primal, masks, reason in (
        (half_a_block, "bn", {}, "192 keys"),
        (plain, "bn", {"key_padding_mask": hidden}, "masks"),
        (plain, mechanism("bn", full=True), {}, "a re-centring and nothing else"),
        ([x.float() for x in plain], "bn", {}, "does not take these tensors"),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            attention(*qkv, primal, impl="recentred", **masks)


def test_dropout_is_that_of_softmax_on_average() -> None:
    torch.manual_seed(0)
    q, k, v = tensors(256, False)
    with torch.no_grad():
        plain = attention(q, k, v, PRIMALS["bn"], impl="recentred").float()
        mean = sum(attention(q, k, v, PRIMALS["bn"], impl="recentred", dropout_p=0.3).float() for _ in range(200)) / 200
    spread = (0.3 / 0.7 / 200) ** 0.5  # of a weight's multiple: of the outputs' norm, too, as values are independent
    assert 0.5 * spread * plain.norm() <= (mean - plain).norm() <= 2 * spread * plain.norm()
