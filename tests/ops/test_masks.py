"""A mask is never dropped, and what it hides is seen neither directly nor through other tokens."""

import pytest
import torch
from torch import Tensor

from primaldual import Primal, attention, mechanism
from primaldual.primal import DepthwiseConv1d, DepthwiseConv2d, Pooled
from support.battery import HEADS, PRIMALS, Case, inputs, outputs_and_gradients, parameters
from support.own import OWN

L = 9
FUTURE = torch.ones(L, L, dtype=torch.bool).triu(1)
DOCUMENTS = torch.block_diag(torch.ones(4, 4), torch.ones(L - 4, L - 4)) == 0
ONE_GAP = FUTURE & (torch.arange(L) != L - 1)
UNPOOLED = [
    name for name, primal in PRIMALS.items()
    if max(primal.training_set.head_scales(HEADS)) == 1 and not primal.causal_refusal(HEADS)
]  # fmt: skip
KERNEL = {"conv_kernel": torch.tensor([0.5, -1.0, 2.0])}


def run(primal: Primal | str, **arguments: object) -> Tensor:
    q, k, v = (torch.randn(2, HEADS, L, 4, generator=torch.Generator().manual_seed(i)).double() for i in range(3))
    out = attention(q, k, v, primal, **arguments)  # type: ignore[arg-type]
    assert isinstance(out, Tensor)
    return out


def as_float(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(mask, -torch.inf)


@pytest.mark.parametrize("as_given", [lambda m: m, as_float], ids=["bool", "float"])
@pytest.mark.parametrize(
    ("map_", "mask"),
    [
        (DepthwiseConv1d(3), FUTURE),
        (DepthwiseConv2d(2), FUTURE),
        (DepthwiseConv1d(3), DOCUMENTS),
        (DepthwiseConv1d(3, causal=True), DOCUMENTS),
        (DepthwiseConv1d(3, causal=True), DOCUMENTS & FUTURE & (torch.arange(L) < 6)),
    ],
    ids=["future", "future in 2-D", "documents", "documents, causal map", "a gap in the future, causal map"],
)
def test_hidden_tokens_are_not_seen_through_a_map_that_mixes_them(map_, mask, as_given) -> None:
    with pytest.raises(ValueError, match=r"attn_mask hides tokens that Depthwise.* mixes into"):
        run(Primal(inputs=(map_,)), attn_mask=as_given(mask))


@pytest.mark.parametrize("low", [-1e4, -1e9, torch.finfo(torch.float32).min])
def test_nor_where_a_low_number_stands_for_minus_infinity(low: float) -> None:
    with pytest.raises(ValueError, match=r"attn_mask hides tokens that Depthwise.* mixes into"):
        run(Primal(inputs=(DepthwiseConv1d(3),)), attn_mask=low * FUTURE)


def test_a_causal_map_takes_a_mask_of_the_future_as_is_causal() -> None:
    primal = Primal(inputs=(DepthwiseConv1d(3, causal=True),))
    expected = run(primal, is_causal=True, parameters=KERNEL)
    for mask in (FUTURE, as_float(FUTURE), -1e9 * FUTURE):
        torch.testing.assert_close(run(primal, attn_mask=mask, parameters=KERNEL), expected)
        torch.testing.assert_close(run(primal, attn_mask=mask, is_causal=True, parameters=KERNEL), expected)


def test_a_map_that_mixes_tokens_takes_a_mask_that_hides_none() -> None:
    bias = torch.randn(L, L).double()
    expected = run(Primal(inputs=(DepthwiseConv1d(1),)), attn_mask=bias, impl="reference")
    torch.testing.assert_close(run(Primal(inputs=(DepthwiseConv1d(3),)), attn_mask=bias), expected)


@pytest.mark.parametrize("mask", ["attn", "attn-bias"])
@pytest.mark.parametrize("name", [name for name in UNPOOLED if "conv1d" not in name])
def test_a_mask_beside_is_causal_applies_too(name: str, mask: str) -> None:
    primal, case = PRIMALS[name], Case(L, L, mask)
    found = outputs_and_gradients(primal, Case(L, L, mask, causal=True), "auto")
    qkv, given = inputs(case)
    learned = parameters(primal, case)
    given["attn_mask"] = (
        given["attn_mask"] | FUTURE if mask == "attn" else given["attn_mask"].masked_fill(FUTURE, -torch.inf)
    )
    expected = attention(*qkv, primal, impl="reference", parameters=learned, **given | {"is_causal": False})
    torch.testing.assert_close(found["out"], expected.detach(), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "mask", [DOCUMENTS, as_float(DOCUMENTS), torch.ones(L, L).tril()], ids=["bool", "float", "bias"]
)
def test_pooled_heads_refuse_what_is_more_than_the_hint(mask: Tensor) -> None:
    with pytest.raises(ValueError, match=r"attn_mask says more than is_causal=True.*\(1, 2, 1, 3, 2, 8\)"):
        run(PRIMALS["sh-uneven"], is_causal=True, attn_mask=mask)


@pytest.mark.parametrize("primal", [OWN["S"], OWN["S that learns"]], ids=str)
def test_scores_of_tokens_are_not_added_to_points_of_one_s_own(primal: Primal) -> None:
    with pytest.raises(ValueError, match=r"adds to the scores of 9 single keys, but .* has [35] points of them"):
        run(primal, attn_mask=torch.randn(L, L))
    assert run(primal, attn_mask=DOCUMENTS).isfinite().all()


@pytest.mark.parametrize("name", ["sh-uneven", "linear-sh", "sparse-sh"])
def test_pooled_heads_refuse_a_bias_that_is_learned_also_while_it_is_zero(name: str) -> None:
    with pytest.raises(ValueError, match="attn_mask says more than is_causal=True"):
        run(PRIMALS[name], is_causal=True, attn_mask=torch.zeros(L, L, requires_grad=True))


def test_masks_inside_vmap_are_looked_at_all_together() -> None:
    q, k, v = (torch.randn(3, 1, 2, L, 4, generator=torch.Generator().manual_seed(i)).double() for i in range(3))
    pooled, mixing = Primal(training_set=Pooled((1, 2))), Primal(inputs=(DepthwiseConv1d(3),))

    def all_of(primal: Primal, masks: Tensor, causal: bool, where: int = 0) -> Tensor:
        one = lambda q, k, v, mask: attention(q, k, v, primal, attn_mask=mask, is_causal=causal, impl="dense")  # noqa: E731
        return torch.vmap(one, in_dims=(0, 0, 0, where))(q, k, v, masks)

    hints, nothing = FUTURE.expand(3, L, L), torch.zeros(3, L, L)
    expected = torch.stack([attention(*x, pooled, is_causal=True) for x in zip(q, k, v, strict=True)])
    for where in (0, 2):
        torch.testing.assert_close(all_of(pooled, hints.movedim(0, where), True, where), expected)
    assert all_of(mixing, nothing, False).isfinite().all()
    with pytest.raises(ValueError, match="attn_mask says more than is_causal=True"):
        all_of(pooled, torch.stack([FUTURE, FUTURE, DOCUMENTS]), True)
    with pytest.raises(ValueError, match="attn_mask hides tokens"):
        all_of(mixing, torch.stack([nothing[0] == 1, nothing[0] == 1, DOCUMENTS]), False)


def test_a_mask_that_changes_is_looked_at_again() -> None:
    mask = FUTURE.clone()
    assert torch.equal(run("bn", is_causal=True, attn_mask=mask), run("bn", is_causal=True))
    mask |= DOCUMENTS
    torch.testing.assert_close(run("bn", is_causal=True, attn_mask=mask), run("bn", attn_mask=FUTURE | DOCUMENTS))


def test_views_of_one_tensor_are_told_apart() -> None:
    both = torch.stack([FUTURE, FUTURE | DOCUMENTS])
    hint, more = (run("softmax", is_causal=True, attn_mask=mask) for mask in both)
    torch.testing.assert_close(hint, run("softmax", attn_mask=FUTURE))
    torch.testing.assert_close(more, run("softmax", attn_mask=FUTURE | DOCUMENTS))


def test_a_compiled_call_drops_no_mask_either() -> None:
    """Its values are not known when it is compiled: both apply, and what must be a hint is checked when it runs."""
    q, k, v = torch.randn(3, 1, 2, L, 4).double()
    pooled = Primal(training_set=Pooled((1, 2)))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def both(mask: Tensor, primal: Primal) -> Tensor:
        return attention(q, k, v, primal, attn_mask=mask, is_causal=True)

    documents = attention(q, k, v, "bn", attn_mask=FUTURE | DOCUMENTS)
    torch.testing.assert_close(both(DOCUMENTS, mechanism("bn")), documents)
    torch.testing.assert_close(both(FUTURE, pooled), attention(q, k, v, pooled, is_causal=True))
    with pytest.raises(RuntimeError, match="attn_mask says more than is_causal=True"):
        both(DOCUMENTS, pooled)
