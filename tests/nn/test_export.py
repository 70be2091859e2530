"""One exported program serves every length; a compiled one, too."""

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from primaldual import MultiheadAttention, Primal, mechanism
from primaldual.kernels.launching import exporting
from primaldual.primal import DepthwiseConv1d, Laplace, Pooled, RmsNorm, Rotary, Scale, Strided

E, H = 16, 4
MECHANISMS = {name: mechanism(name) for name in ("softmax", "bn", "sh", "bn+sh", "conv1d", "linear", "linear-bn")}
MECHANISMS |= {
    "full bn+sh": mechanism("bn+sh", full=True),
    "linear-sh": mechanism("linear-sh"),
    "positions and a temperature": Primal(
        Laplace(),
        inputs=(DepthwiseConv1d(3, True, "each"), Rotary(), RmsNorm(), Scale(learnable=True)),
        training_set=Pooled(),
    ),
    "sparse": mechanism("sparse", pattern=Strided(32)),
    "sparse-bn+sh": mechanism("sparse-bn+sh", pattern=Strided(32)),
}
CAUSAL = [name for name, primal in MECHANISMS.items() if not primal.causal_refusal(H)]
LENGTHS = (8, 37, 130)  # the example has 48: neither these windows nor these chunks divide them


class Layer(nn.Module):
    """A layer called in one way."""

    def __init__(self, name: str, **options: bool) -> None:
        super().__init__()
        self.layer, self.options = MultiheadAttention(E, H, batch_first=True, mechanism=MECHANISMS[name]), options

    def forward(self, x: Tensor, padding: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return self.layer(x, x, x, key_padding_mask=padding, **self.options)


def example(length: int, padded: bool) -> tuple[Tensor, ...]:
    x = torch.randn(2, length, E)
    return (x, torch.arange(length) >= torch.tensor([[length], [length - 3]])) if padded else (x,)


def export_serves_every_length(layer: Layer, padded: bool = False) -> None:
    layer.eval()
    given, n = example(48, padded), torch.export.Dim("n", min=8, max=4095)
    program = torch.export.export(layer, given, dynamic_shapes=({1: n}, {1: n} if padded else None)[: 1 + padded])
    exported = program.module()
    for length in LENGTHS:
        given = example(length, padded)
        for found, expected in zip(exported(*given), layer(*given), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MECHANISMS)
def test_one_exported_program_serves_every_length(name: str) -> None:
    export_serves_every_length(Layer(name, need_weights=False))


def test_so_it_does_with_padding_a_causal_form_and_weights() -> None:
    export_serves_every_length(Layer("bn+sh", need_weights=False), padded=True)
    export_serves_every_length(Layer("linear", need_weights=False, is_causal=True))
    export_serves_every_length(Layer("sh", need_weights=True, is_causal=True))


@pytest.mark.deep
@pytest.mark.parametrize("needed", [False, True], ids=["outputs", "weights"])
@pytest.mark.parametrize("name", CAUSAL)
def test_every_causal_form_is_exported_for_every_length(name: str, needed: bool) -> None:
    export_serves_every_length(Layer(name, need_weights=needed, is_causal=True))


@pytest.mark.deep
@pytest.mark.parametrize("needed", [False, True], ids=["outputs", "weights"])
@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mechanism_is_exported_with_padding(name: str, needed: bool) -> None:
    export_serves_every_length(Layer(name, need_weights=needed), padded=True)


def test_an_executor_that_is_asked_for_is_exported_or_says_why_not() -> None:
    layer = Layer("bn", need_weights=False).eval()
    layer.layer.impl = "linear"
    with pytest.raises(ValueError, match=r"impl='linear' cannot compute this: .*not finite"):
        torch.export.export(layer, example(48, False))


@pytest.mark.parametrize("needed", [False, True], ids=["outputs", "weights"])
def test_squares_of_any_size_compile_without_a_graph_for_each(needed: bool) -> None:
    torch._dynamo.reset()
    layer = MultiheadAttention(E, H, batch_first=True, mechanism="conv2d")
    graphs = CompileCounter()
    compiled = torch.compile(layer, backend=graphs, dynamic=True, fullgraph=True)
    for length in (16, 25, 81, 100):
        x = torch.randn(2, length, E)
        torch.testing.assert_close(compiled(x, x, x, need_weights=needed), layer(x, x, x, need_weights=needed))
    assert graphs.frame_count < 4


def test_what_is_compiled_is_not_taken_for_an_export() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def told(x: torch.Tensor) -> torch.Tensor:
        return x + exporting()

    assert told(torch.zeros(1)) == 0
