"""The same battery on a CUDA device: fused kernels, compiled and captured.

Our own kernels and FlexAttention, which are compiled for every kind of call, have files of their own.
"""

import pytest
import torch

from primaldual import MultiheadAttention, attention
from primaldual.ops import UnsupportedError
from primaldual.primal import Pooled, Primal
from support.battery import CASES, PAIRS, PRIMALS, Case, exists, inputs, parameters, relative_error
from support.rounding import rounded_at_every_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def on_gpu(primal, case: Case, impl: str, dtype: torch.dtype, rounded: torch.dtype | None = None) -> dict | None:
    """Outputs and gradients, or None where the executor refuses."""
    qkv, masks = inputs(case, dtype, rounded)
    qkv = [x.detach().cuda().requires_grad_() for x in qkv]
    masks = {n: m.cuda() if isinstance(m, torch.Tensor) else m for n, m in masks.items()}
    learned = {n: x.detach().cuda().requires_grad_() for n, x in parameters(primal, case, dtype, rounded).items()}
    try:
        out = attention(*qkv, primal, impl=impl, parameters=learned, **masks)
    except UnsupportedError:
        return None
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    leaves = [*qkv, *learned.values()]
    gradients = torch.autograd.grad(out, leaves, up.to(rounded or dtype).to(dtype).cuda())
    return {"out": out.detach(), **{f"grad {i}": g for i, g in enumerate(gradients)}}


FUSED = [(name, impl) for name, impl in PAIRS if impl != "block_sparse"]
SHORT = [case for case in CASES if (case.queries, case.keys) in ((1, 1), (16, 16), (16, 7))]


@pytest.mark.parametrize(("name", "impl"), FUSED)
def test_executor_equals_reference_in_float64(name: str, impl: str) -> None:
    for case in SHORT:
        if not exists(PRIMALS[name], case):
            continue
        found = on_gpu(PRIMALS[name], case, impl, torch.float64)
        if found is None:
            continue
        truth = on_gpu(PRIMALS[name], case, "reference", torch.float64)
        for what, value in truth.items():
            assert relative_error(found[what], value) < 1e-9, f"{case}: {what}"


LOW = [(name, impl, dtype) for name, impl in FUSED for dtype in (torch.float32, torch.bfloat16)]
# test_linear_triton has the kernels of linear attention; in bfloat16 they do not take these dimensions
LOW = [row for row in LOW if row[1:] != ("linear", torch.float32) or row[0] in ("linear", "linear-bn+sh")]


@pytest.mark.parametrize(("name", "impl", "dtype"), LOW, ids=lambda x: str(x).removeprefix("torch."))
def test_low_precision_stays_within_twice_the_reference_s_own_error(name: str, impl: str, dtype: torch.dtype) -> None:
    length = 16 if name == "conv2d" else 37
    cases = [Case(length, length, "padding"), Case(length, length), Case(length, length, "bias", causal=True)]
    for case in cases:
        if not exists(PRIMALS[name], case):
            continue
        found = on_gpu(PRIMALS[name], case, impl, dtype)
        if found is None:
            continue
        truth = on_gpu(PRIMALS[name], case, "reference", torch.float64, rounded=dtype)
        with rounded_at_every_step():
            rough = on_gpu(PRIMALS[name], case, "reference", dtype)
        for what, value in truth.items():
            # the floor is twice the CPU's: where the reference has no error at all (one key per query), a fused
            # kernel's gradient is a difference of two sums of order 5, 6.1e-7 on an H200 where 4 eps are 4.8e-7
            floor = 8 + distance_from_the_first_key(PRIMALS[name], case)
            budget = 2 * relative_error(rough[what], value) + floor * torch.finfo(dtype).eps
            assert relative_error(found[what], value) < budget, f"{case}: {what}"


def distance_from_the_first_key(primal: Primal, case: Case) -> float:
    """Of the points that a query sees, in deviations of these points; the largest, where a causal map divides by them.

    Keys are shared by all queries, and brought near 0 by taking the first one off. What rounding leaves of a point far
    from it is divided by σ² of what a query sees; the reference has keys for each query, and takes off their mean.
    """
    if not case.causal or all(map_.needs != "variance" for map_ in primal.point_maps):
        return 0.0
    keys, largest = inputs(case, torch.float64)[0][1].detach(), 0.0
    pooled = isinstance(primal.training_set, Pooled)
    for head, scale in enumerate(primal.training_set.scales if pooled else (1,) * keys.shape[1]):
        for end in range(scale + 1, keys.shape[2] + 1):
            points = torch.stack([keys[:, head, i : min(i + scale, end)].mean(1) for i in range(0, end, scale)], 1)
            apart = (points - keys[:, head, :1]).abs().amax(1)
            largest = max(largest, float((apart / (points.var(1, correction=0) + 1e-5).sqrt()).max()))
    return largest


@pytest.mark.parametrize("name", ["bn+sh", "linear-bn", "sparse"])
def test_the_layer_trains_compiled_and_in_bfloat16(name: str) -> None:
    layer = MultiheadAttention(64, 8, batch_first=True, mechanism=name, device="cuda")
    x = torch.randn(4, 100, 64, device="cuda")
    eager, _ = layer(x, x, x, need_weights=False)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        compiled, _ = torch.compile(layer, fullgraph=True)(x, x, x, need_weights=False)
    compiled.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    assert (compiled.float() - eager).abs().max() < 0.05


@pytest.mark.parametrize("name", ["softmax", "bn", "bn+sh", "linear-bn+sh", "sparse-bn+sh"])
def test_a_step_can_be_captured_in_a_graph(name: str) -> None:
    q, k, v = (torch.randn(4, 8, 100, 16, device="cuda", requires_grad=True) for _ in range(3))

    def step() -> tuple[torch.Tensor, ...]:
        out = attention(q, k, v, name)
        return (out, *torch.autograd.grad(out.square().sum(), (q, k, v)))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in (q, k, v):
            x.copy_(torch.randn_like(x))
    graph.replay()
    for a, b in zip(captured, step(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)
