"""Long scaled heads: ours forward, and backward cuDNN's beside ours, which a dense formula stands in for here.

Our kernels run in Triton's interpreter, in a child process that runs this file.
"""

from importlib.util import find_spec

import pytest
import torch

from primaldual import attention, mechanism
from primaldual.dual import Expansion
from primaldual.kernels.cudnn import attention as cudnn
from primaldual.kernels.cudnn import beside as parallel
from primaldual.kernels.cudnn import causal
from primaldual.kernels.cudnn.beside import divide
from primaldual.kernels.ragged import tokens as ragged_tokens
from primaldual.kernels.ragged import work as ragged_work
from primaldual.kernels.ragged.passes import Shift, place_three, sum_rows
from primaldual.ops import UnsupportedError, mixed
from primaldual.ops.devices import H200
from primaldual.ops.estimates import estimate, sizes_of
from primaldual.ops.plan import execute
from primaldual.ops.problem import Problem
from support.battery import relative_error
from support.cudnn import stand_in
from support.interpreter import ON_CPU, child_process, on_cpu
from support.ragged import adding_up, check

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

# numpy's, in the interpreter; what overflows is not selected
pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array:DeprecationWarning", "ignore:.*encountered in:RuntimeWarning"
)

SCALES = (1, 1, 2, 4, 4, 8)
SHAPE = (40, 48, 16, 24)  # points: 48, 24, 12, 6
PRIMALS = {
    "sh": mechanism("sh", scales=SCALES),
    "bn+sh": mechanism("bn+sh", beta=0.7, scales=SCALES),
    "bn+sh learned": mechanism("bn+sh", learnable=True, scales=SCALES),
}
CHOSEN = {
    "the longest": [48],
    "two": [48, 24],
    "all": [48, 24, 12, 6],
    "all but the longest": [24, 12, 6],
    "every other": [24, 6],
    "none of them first or last": [24, 12],
}

test_the_kernels_in_the_interpreter = child_process(__file__)
test_more_of_them_in_the_interpreter = child_process(__file__, deep=True)


@on_cpu
@pytest.mark.parametrize("chosen", CHOSEN.values(), ids=CHOSEN)
@pytest.mark.parametrize("name", PRIMALS)
def test_outputs_and_gradients_are_the_references(name: str, chosen: list, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = stand_in(monkeypatch, chosen)
    check(PRIMALS[name], SHAPE, torch.float16, impl="mixed", heads=len(SCALES), batch=2)
    assert seen == chosen


@on_cpu
def test_every_head_has_a_beta_of_its_own() -> None:
    leaves = [torch.randn(2, 6, 48, 16, dtype=torch.float16, requires_grad=True) for _ in range(3)]
    leaves.append(torch.tensor([4.0, -4.0, 3.0, 0.0, -2.0, 5.0], requires_grad=True))
    apart = torch.stack([leaves[3].detach(), torch.full((6,), 9.0)], 1)[:, 0].requires_grad_()  # of any strides
    out = ragged_tokens._Tokens.apply(*leaves, SCALES, False, 0.0, None)
    expected = out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch, [48, 12])
        leaves[3] = apart
        out = parallel.Tokens.apply(*leaves, 1.0, SCALES)
        found = out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)
    assert all(relative_error(mine, other) < 4e-3 for mine, other in zip(found, expected, strict=True))


@on_cpu
def test_a_number_for_beta_is_not_rounded() -> None:
    leaves = [(torch.randn(2, 6, 48, 16) + 24).half().requires_grad_() for _ in range(3)]
    found = []
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch, [48, 12])
        for beta, factor in ((None, 0.7), (torch.full((6,), 0.7), 1.0)):
            out = parallel.Tokens.apply(*leaves, beta, factor, SCALES)
            found.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)])
    assert all(relative_error(mine, other) < 1e-6 for mine, other in zip(*found, strict=True))


@on_cpu
@pytest.mark.parametrize(
    "strided", [False, pytest.param(True, marks=pytest.mark.deep)], ids=["log-sum-exps copied", "as they lie"]
)
@pytest.mark.parametrize("long", [[144], [144, 72, 36, 18]], ids=["the longest", "all"])
@pytest.mark.parametrize("name", ["sh", "bn+sh"])
def test_as_many_launches_as_the_plan_counts(
    name: str, long: list, strided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    stand_in(monkeypatch, long)
    monkeypatch.setattr(cudnn, "STRIDED", strided)
    leaves = [torch.randn(2, 6, 144, 64, dtype=torch.float16, requires_grad=True) for _ in range(3)]
    p = Problem(Expansion(PRIMALS[name]), *leaves)
    with adding_up() as names:
        execute(p, "mixed")[0].backward(leaves[0].detach())
    copies = (0 if strided else len(long)) + (len(long) < 4)  # of the log-sum-exps: for cuDNN, and for ours
    sizes = sizes_of(p, backward=True, captured=True)._replace(device=H200)
    assert len(names) + 3 * len(long) + copies == estimate("mixed", sizes).launches
    assert names.count("place_three") == len(long)
    assert names.count("place") == (name == "bn+sh" and len(long) < 4)


@on_cpu
def test_all_heads_pooled(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sh", "bn+sh"):
        seen = stand_in(monkeypatch, [24, 16])
        check(mechanism(name, scales=(2, 3, 6)), (17, 48, 16, 16), torch.float16, impl="mixed", heads=3, batch=2)
        assert seen == [24, 16]


@on_cpu
def test_half_a_block_of_keys_stays_with_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = parallel.long
    for name, value in (("QUERIES", 1), ("POINTS", 32), ("NARROW", 8)):
        monkeypatch.setattr(parallel, name, value)
    for tokens, expected in ((128, [128, 32]), (192, [96, 48]), (96, [96, 48])):
        seen = stand_in(monkeypatch, [])
        monkeypatch.setattr(parallel, "long", rule)
        primal = mechanism("bn+sh", scales=(1, 2, 4))
        check(primal, (20, tokens, 16, 16), torch.float16, impl="mixed", heads=3)
        assert seen == expected


@on_cpu
def test_windows_that_are_not_whole_go_group_by_group(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = stand_in(monkeypatch, [44, 22, 11])
    check(PRIMALS["bn+sh"], (40, 44, 16, 16), torch.float16, impl="sdpa", heads=len(SCALES), batch=2)
    assert not seen


@on_cpu
@pytest.mark.parametrize("strided", [False, True], ids=["log-sum-exps copied", "as they lie"])
@pytest.mark.parametrize("name", PRIMALS)
def test_log_sum_exps_as_they_lie_and_copied(name: str, strided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """21 of 4 bytes each are not always at a multiple of 16 bytes."""
    seen = stand_in(monkeypatch, [48, 24, 12])
    monkeypatch.setattr(cudnn, "STRIDED", strided)
    check(PRIMALS[name], (21, 48, 16, 24), torch.float16, impl="mixed", heads=len(SCALES), batch=2)
    assert seen == [48, 24, 12]


@on_cpu
@pytest.mark.parametrize(
    ("scales", "length", "dims"),
    [((1, 1, 2, 4), 48, (16, 16)), ((1, 8, 8), 37, (16, 24)), ((1, 2), 1, (8, 8))],
    ids=["whole", "uneven", "one token"],
)  # fmt: skip
def test_causal_heads_over_tokens_go_through_cudnn_and_those_over_windows_through_ours(
    scales: tuple, length: int, dims: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = stand_in(monkeypatch, [])
    for module, name in ((causal, "QUERIES"), (parallel, "NARROW")):
        monkeypatch.setattr(module, name, 0)
    primal = mechanism("sh", scales=scales)
    check(primal, (length, length, *dims), torch.float16, impl="mixed", heads=len(scales), batch=2, is_causal=True)
    assert seen == [length]


@pytest.mark.parametrize(
    ("name", "scales", "keys", "reason"),
    [
        ("bn+sh", (1, 2), 64, "a mean for each query"), ("sh", (2, 4), 64, "over the tokens themselves"),
        ("sh", (1, 2), 65, "as many queries as keys"), ("sh", (1, 3), 64, "no running means of windows of 3"),
        ("sh", (1, 2), 64, "are not the faster ones"),
    ],
)  # fmt: skip
def test_causal_heads_that_are_left_to_others(name: str, scales: tuple, keys: int, reason: str) -> None:
    q, k = (torch.randn(1, 2, length, 64, dtype=torch.bfloat16) for length in (64, keys))
    with pytest.raises(UnsupportedError, match=reason):
        attention(q, k, k, mechanism(name, scales=scales), is_causal=True, impl="mixed")


def thirds(heads: int, length: int, packed: bool) -> list[torch.Tensor]:
    """q, k and v of one projection; or tensors with as long rows of their own, which hold three times as many heads."""
    parts = torch.randn(3, 2, length, 3 * heads, 16, dtype=torch.float16).unbind(0)
    if packed:
        parts = parts[0].unflatten(2, (3, heads)).unbind(2)
    return [x.transpose(1, 2).requires_grad_() for x in parts]


@on_cpu
@pytest.mark.parametrize("first", [True, False], ids=["a third first", "whole rows first"])
@pytest.mark.parametrize("name", ["sh", "bn+sh"])
def test_calls_that_differ_in_their_outputs_alone(name: str, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their queries, keys and values lie alike, so only one of them may leave the queries where they are."""
    seen = stand_in(monkeypatch, [48, 24])
    for packed, copies in (first, 0), (not first, 2 if name == "sh" else 0), (first, 0):
        qkv = thirds(4, 48, packed)
        primal = mechanism(name, scales=(1, 1, 2, 2) + (() if packed else (4,) * 8))
        assert qkv[0].stride() == (48 * 192, 16, 192, 1)
        with adding_up() as names:
            out = attention(*qkv, primal, impl="mixed")
            up = torch.randn_like(out)
            found = out.detach(), *torch.autograd.grad(out, qkv, up)
        exact = [x.detach().double().requires_grad_() for x in qkv]
        out = attention(*exact, primal, impl="reference")
        expected = out.detach(), *torch.autograd.grad(out, exact, up.double())
        assert all(relative_error(x, y) < 4e-3 for x, y in zip(found, expected, strict=True))
        ours = name == "bn+sh" and not packed  # the last heads' gradients, re-centred
        assert names.count("place") == copies + ours
    assert seen == 3 * [48, 24]


@on_cpu
@pytest.mark.parametrize("how", ["off by an element", "rows of 17", "one for all the batch"])
def test_queries_that_cannot_be_read_16_bytes_at_a_time(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = stand_in(monkeypatch, [48, 24])
    qkv = [torch.randn(2, 4, 48, 16, dtype=torch.float16) for _ in range(3)]
    qkv[0] = {
        "off by an element": torch.randn(2 * 4 * 48 * 16 + 1, dtype=torch.float16)[1:].view(2, 4, 48, 16),
        "rows of 17": torch.randn(2, 4, 48, 17, dtype=torch.float16)[..., :16],
        "one for all the batch": torch.randn(1, 4, 48, 16, dtype=torch.float16).expand(2, -1, -1, -1),
    }[how]
    found = []
    for impl in ("mixed", "reference"):
        leaves = [x.detach().requires_grad_() for x in qkv]
        out = attention(*leaves, mechanism("sh", scales=(1, 1, 2, 4)), impl=impl)
        found.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)])
    assert all(relative_error(mine, other) < 8e-3 for mine, other in zip(*found, strict=True))
    assert seen == [48, 24]


@on_cpu
def test_queries_are_copied_where_another_plan_would_run_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps cuDNN's plans by the shapes and strides of queries, keys and values alone."""
    monkeypatch.setattr(cudnn, "_plans", {})
    q = torch.randn(4, 2, 6, 8)
    lse = torch.empty(4, 2, 6, 1)
    outs = [torch.empty(4, 2, 6, 8), *(torch.empty(2, 6, heads, 8).permute(2, 0, 1, 3)[:4] for heads in (4, 8))]
    calls = [(out, q, q, out, lse) for out in outs]
    calls.append((outs[0], q, q, outs[0], torch.empty(2, 4, 6, 1).transpose(0, 1)))
    calls.append((torch.empty(4 * 2 * 6 * 8 + 1)[1:].view_as(q), q, q, outs[0], lse))  # not aligned
    found = [cudnn._told_apart(call[0], q, *call[1:], False) for call in (*calls, *calls)]
    strides = [x.stride() for x in found]
    assert found[0] is q and found[5] is q
    assert strides[:5] == strides[5:] and len(set(strides)) == 5
    assert all(torch.equal(x, q) for x in found)
    another = torch.empty(4, 2, 7, 8)
    assert cudnn._told_apart(outs[1], q, another, another, outs[1], lse, False) is q


@on_cpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shifted", [None, "by a number", "by one for each head"])
@pytest.mark.parametrize("window", [1, 2, 3, 8, *(pytest.param(n, marks=pytest.mark.deep) for n in (4, 5, 6, 7))])
def test_three_put_in_place_at_once(window: int, shifted: str | None, dtype: torch.dtype) -> None:
    for queries, points, dim, value_dim in ((1, 1, 16, 24), (129, 17, 24, 16), (37, 33, 5, 7)):
        tokens = points * window
        found = [
            torch.randn(3, 2, queries, dim, dtype=dtype).transpose(0, 1),
            torch.randn(2, points, 3, dim, dtype=dtype).transpose(1, 2),
            torch.randn(3, 2, points, value_dim, dtype=dtype).transpose(0, 1),
        ]
        heads = 5, 4, 3  # in a share of more
        wide = [
            torch.full((2, n, many, x.shape[-1]), 7.0, dtype=dtype).transpose(1, 2)
            for x, n, many in zip(found, (queries, tokens, tokens), heads, strict=True)
        ]
        beta = torch.tensor([2.0, 0.0, -1.0]) if shifted == "by one for each head" else None
        shift = None if shifted is None else Shift(sum_rows(found[0]), 0.5 / tokens, beta)
        place_three(tuple(found), tuple(x[:, :3] for x in wide), window=window, shift=shift)
        expected = [found[0].float()] + [x.float().repeat_interleave(window, 2) / window for x in found[1:]]
        if shift is not None:
            off = 0.5 / tokens * found[0].float().sum(2, keepdim=True)
            expected[1] = expected[1] - off * (1.0 if beta is None else beta[:, None, None])
        eps = torch.finfo(dtype).eps
        for there, values in zip(wide, expected, strict=True):
            torch.testing.assert_close(there[:, :3].float(), values, rtol=2 * eps, atol=4 * eps)
            assert (there[:, 3:] == 7).all()


@pytest.mark.skipif(ON_CPU, reason="the interpreter does not compile")
@pytest.mark.parametrize("shifted", [False, True], ids=["copied", "re-centred"])
def test_three_put_in_place_at_once_on_hopper(shifted: bool) -> None:
    """Compiled with no GPU: reads and writes take 16 bytes at a time."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = ragged_work.kernels().place_three
    constants: dict = {"D": 64, "DV": 64, "BLOCK_D": 64, "BLOCK_DV": 64, "BN": 128, "BP": 16, "PDL": True}
    constants |= {} if shifted else {"sums_ptr": None, "beta_ptr": None}
    kinds = {"sums_ptr": "*fp32", "beta_ptr": "*fp32", "factor": "fp32"}
    kinds |= dict.fromkeys(("H", "queries", "tokens", "window", "blocks"), "i32")
    signature, divisible = {}, {}
    for i, name in enumerate(kernel.arg_names):
        signature[name] = kinds.get(name, "*bf16" if name.endswith("_ptr") else "i32")
        if name in constants:
            signature[name] = "constexpr"
        elif name not in kinds:
            divisible[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=divisible)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 1})
    each = 128 * 64 * 2 // (128 * 16)  # of a thread
    assert [compiled.asm["ptx"].count(f"{way}.global.v4.b32") for way in ("ld", "st")] == [3 * each] * 2


def long_heads(length: int, scales: tuple = SCALES, dropout_p: float = 0.0, dim: int = 64, **others) -> Problem:
    x = torch.empty(2, len(scales), length, dim, device="meta", dtype=torch.bfloat16)
    primal = mechanism("bn+sh", scales=scales, **others)
    return Problem(Expansion(primal), x, x, x, dropout_p=dropout_p)


def test_which_groups_are_long() -> None:
    assert [mixed.long_groups(long_heads(n)) for n in (1024, 2048, 4096, 8192, 16384)] == [0, 0, 2, 3, 4]
    assert mixed.long_groups(long_heads(4096, scales=(2, 2, 4))) == 1
    assert mixed.long_groups(long_heads(4096 + 64)) == 1  # half a block at scale 1, and not at 2


def test_what_does_not_go_back_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cuDNN's attention does not take" in str(mixed.refusal(long_heads(4096)))  # a tensor without data
    monkeypatch.setattr(cudnn, "usable", lambda q, k, v: True)
    assert mixed.refusal(long_heads(4096)) is None
    assert "do not divide 4100 tokens" in str(mixed.refusal(long_heads(4096 + 4)))
    for scales in ((2, 1), (1, 1)):
        assert "one scale" in str(mixed.refusal(long_heads(4096, scales)))
    assert "drops" in str(mixed.refusal(long_heads(4096, dropout_p=0.1)))
    assert "long enough" in str(mixed.refusal(long_heads(4096, dim=32)))
    for other in ({"how": "max"}, {"prefix": 1}):
        assert "plain windows" in str(mixed.refusal(long_heads(4096, **other)))


def test_parts_cover_the_heads_once_and_ours_stay_together() -> None:
    layout = parallel._layout((1, 1, 2, 2, 4, 4, 8, 8), 8, 4096, 64, 64, False)
    long, shorter, rest = divide(layout, 4096, 64)
    assert [part.heads for part in (long, shorter, rest)] == [slice(0, 2), slice(2, 4), slice(4, 8)]
    assert [part.cudnn for part in (long, shorter, rest)] == [True, True, False]
    assert [(at.head, at.points) for at in rest.layout] == [(0, 1024), (1, 1024), (2, 512), (3, 512)]
    assert [part.cudnn for part in divide(layout, 16384, 64)] == [True, True, False]
    assert [part.cudnn for part in divide(layout, 2048, 64)] == [False]
