"""FlexAttention per piece on a CUDA device: outputs and gradients against the reference, at odd lengths."""

import pytest
import torch

from primaldual import Primal, attention
from primaldual.kernels.flex import attention as flex
from primaldual.primal import Fixed, Pooled, Recenter, Sparse, Strided, Window
from support.battery import relative_error
from support.rounding import rounded_at_every_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]

PATTERNS = {"strided": Strided(), "fixed": Fixed(summary=2), "window": Window(64)}
SCALES = (1, 3, 1, 3)
"""FlexAttention compiles for half a minute for a dtype, a head dimension, a bias or none, and sizes of 1: none here."""


def tensors(length: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.randn(2, len(SCALES), length, 32, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]


def outputs_and_gradients(
    primal: Primal, length: int, dtype: torch.dtype, impl: str, rounded: torch.dtype, **masks: object
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    qkv = [torch.randn(2, len(SCALES), length, 32, generator=generator).to(rounded) for _ in range(4)]
    q, k, v, up = (x.to("cuda", dtype).requires_grad_() for x in qkv)
    out = attention(q, k, v, primal, impl=impl, **masks)
    assert isinstance(out, torch.Tensor)
    return {"out": out.detach()} | dict(zip("qkv", torch.autograd.grad(out, (q, k, v), up), strict=True))


CASES = [(name, torch.bfloat16, length) for name in PATTERNS for length in (17, 129, 1000, 4097)]
CASES += [("window", torch.float32, 129)]


@pytest.mark.parametrize(("name", "dtype", "length"), CASES, ids=lambda x: str(x).removeprefix("torch."))
def test_pieces_equal_the_reference(name: str, dtype: torch.dtype, length: int) -> None:
    dense = "reference" if length <= 1000 else "sdpa"  # the reference holds a training set for every causal query
    hidden = torch.rand(2, length, device="cuda") < 0.3
    primal = Primal(inputs=(Recenter(),), training_set=Sparse(PATTERNS[name], Pooled(SCALES)))
    for masks in ({}, {"key_padding_mask": hidden}, {"is_causal": True}):
        with rounded_at_every_step():
            truth, rough, found = (
                outputs_and_gradients(primal, length, kind, impl, dtype, **masks)
                for kind, impl in ((torch.float64, dense), (dtype, dense), (dtype, "block_sparse"))
            )
        for what, value in truth.items():
            budget = 2 * relative_error(rough[what], value) + 8 * torch.finfo(dtype).eps
            assert relative_error(found[what], value) < budget, f"{list(masks)}: {what}"


def test_dropout_takes_the_plain_pieces() -> None:
    q = torch.randn(2, 2, 300, 32, device="cuda", requires_grad=True)
    out = attention(q, q, q, Primal(training_set=Sparse(Strided(16))), impl="block_sparse", dropout_p=0.5)
    assert torch.autograd.grad(out.sum(), q)[0].isfinite().all()


def test_memory_and_masks_grow_as_what_is_kept() -> None:
    """Where all scores would take 32 GiB a head."""
    q, k, v = tensors(131072)
    torch.cuda.reset_peak_memory_stats()
    for pattern in (Strided(None), Fixed(None, 2), Window(64)):
        out = attention(q, k, v, Primal(training_set=Sparse(pattern)), impl="block_sparse")
        assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k, v)))
    assert torch.cuda.max_memory_allocated() < 2**32


def test_a_mask_met_in_inference_serves_training() -> None:
    flex._remembered.kept.clear()
    q, k, v = tensors(500)
    primal = Primal(training_set=Sparse(Window(30)))
    with torch.inference_mode():
        attention(q, k, v, primal, impl="block_sparse")
    assert torch.autograd.grad(attention(q, k, v, primal, impl="block_sparse").sum(), q)[0].isfinite().all()


def test_compiles_into_one_graph() -> None:
    primal = Primal(training_set=Sparse(Window(64), Pooled(SCALES)))
    qkv = tensors(600, torch.float32)

    def run(*qkv: torch.Tensor) -> torch.Tensor:
        return attention(*qkv, primal, impl="block_sparse")

    torch.testing.assert_close(torch.compile(run, fullgraph=True)(*qkv), run(*qkv), rtol=0, atol=1e-4)
