"""A sparse head is the merge of its pattern's pieces, and costs what it keeps."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as torch_flex
from torch.utils.flop_counter import FlopCounterMode

from primaldual import Primal, attention, mechanism
from primaldual.dual import Expansion
from primaldual.kernels.flex import attention as flex
from primaldual.kernels.flex.attention import FAR, TILE, Span, build_block_mask, tiles
from primaldual.ops import block_sparse, gathered
from primaldual.ops.gathered import Laid
from primaldual.primal import Fixed, Pattern, Pooled, Sparse, Strided, Window
from support.battery import CASES, PRIMALS, Case, exists, outputs_and_gradients, relative_error, runs

SPARSE = [name for name, primal in PRIMALS.items() if runs(primal, Case(16, 16), "block_sparse")]
PATTERNS = {"strided": Strided(11), "fixed": Fixed(11, 2), "window": Window(9), "strided-1": Strided(1)}


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decomposition of the GPU, on any device: spans over whole bands, with the plain softmax in flex's place."""
    monkeypatch.setattr(block_sparse, "_flex_runs", lambda p: True)
    monkeypatch.setattr(block_sparse, "_flex", gathered.dense)


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.usefixtures("fused")
def test_the_pieces_of_the_gpu_equal_the_reference(name: str) -> None:
    for case in CASES:
        if not exists(PRIMALS[name], case) or not runs(PRIMALS[name], case, "block_sparse"):
            continue
        truth = outputs_and_gradients(PRIMALS[name], case, "reference")
        found = outputs_and_gradients(PRIMALS[name], case, "block_sparse")
        for what, value in truth.items():
            assert relative_error(found[what], value) < 1e-9, f"{case}: {what}"


@pytest.mark.parametrize("way", ["gathered", "fused"])
@pytest.mark.parametrize("pooled", [(1, 1), (1, 3)], ids=["tokens", "sh"])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("length", [1, 17, 129, 200])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_odd_lengths_equal_the_reference(
    pattern: str, length: int, causal: bool, pooled: tuple, way: str, request: pytest.FixtureRequest
) -> None:
    if way == "fused":
        request.getfixturevalue("fused")
    primal = Primal(training_set=Sparse(PATTERNS[pattern], Pooled(pooled)))
    q, k, v = (torch.randn(2, 2, length, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    hidden = torch.rand(2, length) < 0.3
    for mask in (None, hidden):
        results = []
        for impl in ("block_sparse", "reference"):
            out = attention(q, k, v, primal, impl=impl, is_causal=causal, key_padding_mask=mask)
            results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
        for mine, truth in zip(*results, strict=True):
            torch.testing.assert_close(mine, truth, rtol=0, atol=1e-10)


@pytest.mark.parametrize("over", [Pooled((1, 2), prefix=3), Pooled((1, 2), grid=(5, 7))], ids=["prefix", "grid"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_prefix_and_a_grid_equal_the_reference(pattern: str, over: Pooled) -> None:
    q, k, v = torch.randn(3, 2, 2, 35, 4, dtype=torch.float64)
    primal = Primal(training_set=Sparse(PATTERNS[pattern], over))
    mine, truth = (attention(q, k, v, primal, impl=impl) for impl in ("block_sparse", "reference"))
    torch.testing.assert_close(mine, truth, rtol=0, atol=1e-12)


spans = st.builds(
    lambda a, b, low, wide, hole: Span(a, b, low, low + wide, hole),
    st.integers(1, 9), st.integers(1, 9),
    st.integers(-300, 300) | st.just(-FAR), st.integers(0, 400) | st.just(2 * FAR),
    st.integers(-9, 9) | st.just(2 * FAR),
)  # fmt: skip


@given(span=spans, rows=st.integers(1, 700), columns=st.integers(1, 700))
def test_tiles_are_those_of_the_dense_mask(span: Span, rows: int, columns: int) -> None:
    dense = span.allows(torch.arange(rows)[:, None], torch.arange(columns))
    padded = torch.nn.functional.pad(dense, (0, -columns % TILE, 0, -rows % TILE))
    seen = padded.unflatten(1, (-1, TILE)).unflatten(0, (-1, TILE)).sum((1, 3))
    for truth, found in ((seen, tiles(span, rows, columns, torch.device("cpu"))),
                         (seen.T, tiles(span.transposed(), columns, rows, torch.device("cpu")))):  # fmt: skip
        listed = [torch.zeros_like(truth, dtype=torch.bool) for _ in found]
        for flags, (count, index) in zip(listed, found, strict=True):
            for row in range(len(truth)):
                flags[row, index[0, 0, row, : count[0, 0, row]].long()] = True
        partial, whole = listed
        assert torch.equal(whole, truth == TILE * TILE)
        assert not (partial & whole).any()
        # a tile of nothing but the hole may be listed: it is masked like any other
        assert not ((truth > 0) & ~(partial | whole)).any()
        assert span.hole != 2 * FAR or torch.equal(partial | whole, truth > 0)


def test_a_mask_holds_what_is_kept_not_all_pairs() -> None:
    mask = build_block_mask(Span(1, 1, -255, 255, 0), 65536, 65536, torch.device("cpu"))
    tables = [x for x in mask.as_tuple() if isinstance(x, torch.Tensor)]
    assert sum(x.numel() for x in tables) < 50 * 65536 // TILE
    assert int(mask.kv_num_blocks.max() + mask.full_kv_num_blocks.max()) <= 7


def test_masks_are_remembered_and_padding_builds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    monkeypatch.setattr(flex, "build_block_mask", lambda *a: built.append(a) or object())
    monkeypatch.setattr(block_sparse, "_flex_runs", lambda p: True)

    def looked_up(laid: Laid) -> gathered.Part:
        flex._block_mask(laid.span, laid.q.shape[2], laid.keys.shape[2], laid.q.device)
        return gathered.dense(laid)

    monkeypatch.setattr(block_sparse, "_flex", looked_up)
    flex._remembered.kept.clear()
    q, primal = torch.randn(2, 2, 60, 4), Primal(training_set=Sparse(Strided(7)))
    for hidden in (None, torch.rand(2, 60) < 0.5, torch.rand(2, 60) < 0.5, None):
        attention(q, q, q, primal, impl="block_sparse", key_padding_mask=hidden)
    flex._remembered.kept.clear()
    assert len(built) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_flex_attention_gives_the_softmax_its_log_sum_exp_and_their_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention's own dense form, traced as on a GPU: torch has none of its kernels with gradients on a CPU."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    compiled = torch.compile(torch_flex.flex_attention, backend="aot_eager", dynamic=True)
    monkeypatch.setattr(flex, "_compiled_flex", lambda dynamic: compiled)
    for span, heads in ((Span(2, 1, -20, 20, 0), 1), (None, 2)):
        q, k, v = (torch.randn(2, 2, n, d, requires_grad=True) for n, d in ((150, 8), (75, 8), (75, 5)))
        bias = torch.randn(2, heads, 75).masked_fill(torch.rand(2, heads, 75) < 0.3, -torch.inf)
        bias[0] = -torch.inf
        laid = Laid(q, k, v, bias, span, lambda x: x)
        results = []
        for attend_piece in (block_sparse._flex, gathered.dense):
            out, lse = attend_piece(laid)
            total = out.square().sum() + lse.masked_fill(lse == -torch.inf, 0.0).square().sum()
            results.append((out, lse, *torch.autograd.grad(total, (q, k, v))))
        for mine, other in zip(*results, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def test_pieces_without_keys_merge_to_zero_with_zero_gradients() -> None:
    out, lse = torch.randn(2, 3, 4, requires_grad=True), torch.full((2, 3), -torch.inf, requires_grad=True)
    merged = gathered.merge([(out, lse), (out * 2, lse)])
    assert not merged.any()
    assert all(not g.any() for g in torch.autograd.grad(merged.sum(), (out, lse)))


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_dropout_drops_weights_and_scales_the_rest(pattern: str, causal: bool) -> None:
    q, k = torch.randn(2, 1, 2, 30, 4)
    v = torch.eye(30).expand(1, 2, 30, 30)  # outputs are the weights, shared by the tokens of a window
    primal = Primal(training_set=Sparse(PATTERNS[pattern], Pooled((1, 2))))
    weights = attention(q, k, v, primal, impl="reference", is_causal=causal)
    dropped = attention(q, k, v, primal, impl="block_sparse", is_causal=causal, dropout_p=0.4)
    torch.testing.assert_close(dropped, torch.where(dropped == 0, 0.0, weights / 0.6))
    assert 0.2 < float((dropped[weights > 0] == 0).float().mean()) < 0.6
    assert all((head.diagonal() == 0).any() for head in dropped[0])  # also of a window that is still running


@pytest.mark.parametrize("pattern", [Strided(None), Fixed(None), Window(16)])
def test_flops_grow_as_what_is_kept(pattern: Pattern) -> None:
    """N·√N for patterns of stride √N and N for a window, forward and backward."""
    counted = []
    for length in (256, 1024):
        q = torch.randn(1, 1, length, 16, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            attention(q, q, q, mechanism("sparse", pattern=pattern), impl="block_sparse").sum().backward()
        counted.append(counter.get_total_flops())
    growth = 4 if pattern == Window(16) else 8
    assert 0.8 * growth < counted[1] / counted[0] < 1.3 * growth


@pytest.mark.usefixtures("fused")
def test_the_estimate_counts_whole_tiles() -> None:
    q = torch.empty(4, 8, 4096, 64, device="meta")
    problem = block_sparse.Problem(Expansion(Primal(training_set=Sparse(Strided(64)))), q, q, q)
    cost = block_sparse.estimate(problem)
    # 64 residues as half a tile of rows by one of columns, and a band of three tiles
    assert cost == (4 * 4 * 8 * 4096 * (2 * TILE + 3 * TILE) * 64, 2)
