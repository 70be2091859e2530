"""The Triton kernels of linear attention against the reference.

Where there is no GPU they run in Triton's interpreter, which must be switched on before Triton is imported: in a child
process that runs this file. It computes bfloat16 products wrongly without a word, so those are tested on a GPU alone.
"""

from importlib.util import find_spec

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from primaldual import Primal, attention, mechanism
from primaldual.primal import EluPlusOne, RandomFeatures, Recenter, RmsNorm
from support.battery import relative_error
from support.interpreter import HOPPER, ON_CPU, child_process, on_cpu
from support.rounding import rounded_at_every_step

# numpy's, in the interpreter; what overflows is not selected
pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array:DeprecationWarning", "ignore:overflow encountered in exp2:RuntimeWarning"
)
on_gpu = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")]

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

HEADS = 2
PRIMALS = {
    "elu": Primal(features=EluPlusOne()),
    "bn": mechanism("linear-bn", full=True),
    "bn+sh": mechanism("linear-bn+sh", scales=(1, 3)),
    "random": Primal(features=RandomFeatures(24)),
    "random-bn": mechanism("linear-bn", features=RandomFeatures(8), full=True, learnable=True),
    "rms": Primal(features=EluPlusOne(), inputs=(RmsNorm(),)),
    "rms-bn": Primal(features=EluPlusOne(), inputs=(RmsNorm(), Recenter(0.5, learnable=True))),
}
CAUSAL = ("elu", "random", "rms")  # finite features have no causal re-centring; causal pooled heads run in torch
SHAPES = {"one": (1, 1, 8, 8), "odd": (37, 29, 20, 9), "longer": (17, 150, 16, 16), "even": (128, 128, 16, 32)}


test_the_kernels_in_the_interpreter = child_process(__file__)


def run(primal, shape, mask, is_causal, impl, dtype, device, rounded=None) -> dict:
    """The output and every gradient, of inputs that are rounded first."""
    L, S, D, C = shape
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        x = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return x.to(rounded or dtype).to(device, dtype).requires_grad_()

    leaves = {"q": draw(2, HEADS, L, D), "k": draw(2, HEADS, S, D), "v": draw(2, HEADS, S, C)}
    qkv = list(leaves.values())
    hide = torch.rand(2, S, generator=generator) < 0.4
    hide[0] = True  # a batch with nothing to see
    padding = None
    if mask == "padding":
        padding = hide.to(device)
    elif mask == "bias":
        leaves["bias"] = draw(2, S)
        padding = leaves["bias"].masked_fill(hide.to(device), -torch.inf)
    learned = {}
    for name, start in primal.learned(HEADS, D).items():
        learned[name] = (start.double() + 0.3).to(rounded or dtype).to(device, dtype).requires_grad_()
    out = attention(*qkv, primal, key_padding_mask=padding, is_causal=is_causal, parameters=learned, impl=impl)
    up = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(rounded or dtype).to(device, dtype)
    leaves |= learned
    gradients = torch.autograd.grad(out, list(leaves.values()), up)
    return {"out": out.detach()} | dict(zip(leaves, gradients, strict=True))


def check(name: str, shape: tuple, mask: str, is_causal: bool, dtype: torch.dtype, device: str) -> None:
    """Outputs and gradients within twice the reference's own error at this dtype, and a few eps."""
    primal = PRIMALS[name]
    found = run(primal, shape, mask, is_causal, "linear", dtype, device)
    with rounded_at_every_step():
        rough = run(primal, shape, mask, is_causal, "reference", dtype, device)
    truth = run(primal, shape, mask, is_causal, "reference", torch.float64, device, rounded=dtype)
    for what, value in truth.items():
        budget = 2 * relative_error(rough[what], value) + 8 * torch.finfo(dtype).eps
        assert relative_error(found[what], value) < budget, what


@pytest.fixture
def calls(monkeypatch) -> list:
    """The calls of the operator, so that a test knows that it ran."""
    from primaldual.kernels.linear import attention as linear_triton

    seen, run = [], linear_triton.linear_attention
    monkeypatch.setattr(linear_triton, "linear_attention", lambda *a: (seen.append(a), run(*a))[1])
    return seen


def tensors(shape=(40, 40, 16, 24), dtype=torch.float32, device="cpu") -> list:
    L, S, D, C = shape
    return [torch.randn(2, HEADS, n, d, dtype=dtype, device=device) for n, d in ((L, D), (S, D), (S, C))]


@on_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("mask", ["none", "padding", "bias"])
@pytest.mark.parametrize("name", PRIMALS)
def test_equals_the_reference(name: str, mask: str, dtype: torch.dtype, calls: list) -> None:
    for shape in SHAPES if (name, mask, dtype) == ("elu", "none", torch.float32) else ["odd"]:
        check(name, SHAPES[shape], mask, False, dtype, "cpu")
    assert calls


@on_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("mask", ["none", "padding", "bias"])
@pytest.mark.parametrize("name", CAUSAL)
def test_the_causal_form_equals_the_reference(name: str, mask: str, dtype: torch.dtype, calls: list) -> None:
    for shape in SHAPES if (name, mask, dtype) == ("elu", "none", torch.float32) else ["odd"]:
        check(name, SHAPES[shape], mask, True, dtype, "cpu")
    assert calls


@on_cpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("programs", [1, 100], ids=["one program", "many programs"])
def test_a_sequence_is_cut_into_spans(programs: int, is_causal: bool, monkeypatch) -> None:
    from primaldual.kernels.linear import attention as linear_triton

    monkeypatch.setattr(linear_triton, "PROGRAMS", programs)
    assert linear_triton.TILE < 140
    check("elu", (140, 135, 8, 8), "bias", is_causal, torch.float32, "cpu")


@on_cpu
@pytest.mark.parametrize("is_causal", [False, True])
def test_any_strides(is_causal: bool) -> None:
    q, k, v = tensors()
    strided = (
        q.transpose(1, 2).contiguous().transpose(1, 2),
        torch.stack([k, k], dim=-1).flatten(-2)[..., ::2],
        v.transpose(2, 3).contiguous().transpose(2, 3),
    )
    straight, other = (
        attention(*(x.requires_grad_() for x in qkv), "linear", is_causal=is_causal, impl="linear")
        for qkv in ((q, k, v), strided)
    )
    assert other.transpose(1, 2).is_contiguous()  # laid out as the queries are
    grads = torch.autograd.grad(straight.sum(), (q, k, v)), torch.autograd.grad(other.sum(), strided)
    for mine, same in zip((straight, *grads[0]), (other, *grads[1]), strict=True):
        if HOPPER:  # compiled for other strides, sums can have another order
            torch.testing.assert_close(mine, same, rtol=0, atol=1e-6)
        else:
            assert torch.equal(mine, same)


@on_cpu
@pytest.mark.parametrize("shape", [(0, 3, 8, 8), (3, 0, 8, 8)], ids=["no queries", "no keys"])
def test_nothing_in_gives_nothing_or_zeros(shape: tuple) -> None:
    for batch in (0, 2):
        q, k, v = (x[:batch].requires_grad_() for x in tensors(shape))
        out = attention(q, k, v, "linear", impl="linear")
        assert out.shape == (batch, HEADS, shape[0], shape[3])
        assert not out.any()
        assert not any(g.any() for g in torch.autograd.grad(out.sum(), (q, k, v)))


@on_cpu
def test_values_far_from_zero_keep_their_deviations() -> None:
    q, k, v = tensors(dtype=torch.float16)
    v = (v + 100).requires_grad_()
    q.requires_grad_()
    out = attention(q, k, v, "linear", impl="linear")
    truth = attention(q.double(), k.double(), v.double(), "linear", impl="reference")
    up = torch.randn_like(out)
    mine, other = (torch.autograd.grad(o, q, up.to(o.dtype))[0] for o in (out, truth))
    assert (out.double() - truth).abs().max() < 0.04  # half a step of float16 at 100, and a little
    assert relative_error(mine, other.double()) < 2e-3


@on_cpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_opcheck(is_causal: bool) -> None:
    from primaldual.kernels.linear.attention import linear_attention, linear_attention_backward

    q, k, v = (x[:1] for x in tensors((20, 20, 8, 8)))
    maps = [torch.rand(1, HEADS, 8), torch.rand(1, HEADS, 8) + 0.5]
    omega, weight = torch.randn(12, 8), torch.rand(1, 1, 20)
    out, state = linear_attention(q, k, v, *maps, omega, weight, is_causal)
    torch.library.opcheck(linear_attention_backward, (out, q, k, v, *maps, omega, weight, state, is_causal))
    for x in (q, k, v, *maps, weight):
        x.requires_grad_()
    torch.library.opcheck(linear_attention, (q, k, v, *maps, omega, weight, is_causal))


@on_cpu
@pytest.mark.parametrize("is_causal", [False, True])
def test_compiles_into_one_graph(is_causal: bool) -> None:
    name = "rms" if is_causal else "rms-bn"

    def step(q, k, v):
        out = attention(q, k, v, PRIMALS[name], is_causal=is_causal, impl="linear")
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    qkv = [x.requires_grad_() for x in tensors()]
    compiled = torch.compile(
        lambda *x: attention(*x, PRIMALS[name], is_causal=is_causal, impl="linear"),
        backend="aot_eager",
        fullgraph=True,
    )
    out = compiled(*qkv)
    found = out, *torch.autograd.grad(out.square().sum(), qkv)
    for mine, other in zip(found, step(*qkv), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)


@on_cpu
def test_vmap_takes_the_path_in_torch(calls: list) -> None:
    qkv = torch.randn(3, 3, 1, HEADS, 5, 8)
    together = torch.vmap(lambda q, k, v: attention(q, k, v, "linear"))(*qkv)
    assert not calls
    loop = torch.stack([attention(*x, "linear") for x in qkv.transpose(0, 1)])
    assert calls
    torch.testing.assert_close(together, loop, rtol=0, atol=1e-5)


@on_cpu
def test_operations_are_counted() -> None:
    q, k, v = tensors((40, 30, 16, 24))
    with FlopCounterMode(display=False) as counter:
        attention(q, k, v, "linear")
    assert counter.get_total_flops() == 2 * 2 * HEADS * (40 + 30) * 16 * 24


@on_cpu
def test_autocast_computes_at_its_dtype(calls: list) -> None:
    with torch.autocast("cpu", dtype=torch.float16):
        out = attention(*tensors(), "linear")
    assert out.dtype == torch.float16
    assert calls[0][0].dtype == torch.float16


def compiled_for_hopper(kernel, tile, dim: int) -> str:
    """The kernel of elu + 1 in bfloat16, without masks and maps, as Triton's intermediate code; no GPU is needed."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants: dict = dict.fromkeys(("D", "F", "C", "BLOCK_D", "BLOCK_F", "BLOCK_C"), dim)
    constants |= {"EVEN": True, "BLOCK": tile.rows, "RANDOM": False, "PRECISION": "ieee", "STAGES": tile.stages}
    constants |= dict.fromkeys(("weight", "shift", "scale", "omega", "moments", "grad_weight"))
    kinds = dict.fromkeys(("H", "queries", "keys", "length", "per_program"), "i32")
    kinds |= dict.fromkeys(("state", "partial", "normalizer", "deltas", "after"), "*fp32")
    signature, divisible = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("strides"):
            signature[name] = ("i32", "i32", "i32", "constexpr")
            constants[(i, 3)] = 1
            divisible |= {(i, j): [["tt.divisibility", 16]] for j in range(3)}
        else:
            signature[name] = kinds.get(name, "*bf16")
            divisible[(i,)] = [["tt.divisibility", 16]]
    constants = {name: x for name, x in constants.items() if isinstance(name, tuple) or name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=divisible)
    return triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": tile.warps, "num_stages": 3}
    ).asm["ttgir"]


@pytest.mark.skipif(ON_CPU, reason="the interpreter does not compile")
@pytest.mark.parametrize("name", ["attend_causal", "causal_query_gradients", "causal_key_gradients"])
def test_every_product_ends_in_the_turn_that_starts_it(name: str) -> None:
    """On Hopper a product left in flight reads registers that the next turn writes (triton-lang/triton#9433)."""
    from primaldual.kernels.linear import causal_kernels as kernels
    from primaldual.kernels.linear.attention import tile_of

    lines = compiled_for_hopper(getattr(kernels, name), tile_of(name, torch.bfloat16, 64), 64).splitlines()
    starts = [i for i, line in enumerate(lines) if "ttng.warp_group_dot " in line]
    assert starts
    for i in starts:
        assert "warp_group_dot_wait" in lines[i + 1] and "pendings = 0" in lines[i + 1], lines[i]


class TestOnGpu:
    """Kernels are compiled for every dtype, dimension, feature map and mask: few of each tell, on one shape."""

    pytestmark = on_gpu

    @pytest.mark.parametrize("mask", ["none", "bias"])
    @pytest.mark.parametrize("name", PRIMALS)
    def test_equals_the_reference(self, name: str, mask: str, calls: list) -> None:
        check(name, (127, 129, 32, 24), mask, False, torch.bfloat16, "cuda")
        assert calls

    @pytest.mark.parametrize(("name", "dtype"), [("bn", torch.float32), ("random", torch.float32),
                                                 ("elu", torch.float16)], ids=str)  # fmt: skip
    def test_other_dtypes(self, name: str, dtype: torch.dtype, calls: list) -> None:
        check(name, (127, 129, 32, 24), "bias", False, dtype, "cuda")
        assert calls

    @pytest.mark.parametrize("shape", [(1, 1, 8, 8), (17, 150, 16, 16), (128, 128, 16, 32), (1000, 1000, 128, 104)],
                             ids=str)  # fmt: skip
    def test_shapes(self, shape: tuple, calls: list) -> None:
        check("elu", shape, "none", False, torch.bfloat16, "cuda")
        assert calls

    def test_what_the_kernels_do_not_take_runs_in_torch(self, calls: list) -> None:
        check("elu", (37, 29, 20, 9), "padding", False, torch.bfloat16, "cuda")
        assert not calls

    @pytest.mark.parametrize("name", ["elu", "bn", "random"])
    def test_a_long_sequence_is_finite_and_reproducible(self, name: str) -> None:
        qkv = [x.requires_grad_() for x in tensors((65536, 65536, 64, 64), torch.bfloat16, "cuda")]
        steps = []
        for _ in range(2):
            out = attention(*qkv, PRIMALS[name])
            steps.append((out, *torch.autograd.grad(out, qkv, torch.ones_like(out))))
        assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(*steps, strict=True))
