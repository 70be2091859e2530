"""Grouped queries: query heads of a group share keys, values, points and statistics. The battery has the executors."""

import gc
import weakref
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from primaldual import Primal, attention, mechanism
from primaldual.ops import plan
from primaldual.ops.problem import state
from primaldual.primal import Pooled, Recenter, Sparse, TokenMap, TrainingSet, Window
from support.battery import HEADS, outputs_and_gradients, relative_error, repeated


def tensors(kv_heads: int, length: int = 9, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, h, length, 4, generator=generator).to(dtype) for h in (HEADS, kv_heads, kv_heads))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["softmax", "bn+sh", "linear", "sparse-sh"])
def test_weights_are_those_of_every_query_head(name: str, causal: bool) -> None:
    primal = mechanism(name)
    q, k, v = tensors(3)
    given, _ = repeated(q, k, v, primal, {})
    for found, expected in zip(
        attention(q, k, v, primal, is_causal=causal and name != "bn+sh", need_weights=True),
        attention(*given, is_causal=causal and name != "bn+sh", need_weights=True, impl="reference"),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("causal", [False, True])
def test_a_second_call_of_a_kind_is_the_first_again(causal: bool) -> None:
    q, k, v = tensors(3)
    first = attention(q, k, v, "bn+sh", is_causal=causal)
    other = attention(q, k, 2 * v, "bn+sh", is_causal=causal)
    torch.testing.assert_close(other, 2 * first)


@pytest.mark.parametrize("causal", [False, True])
def test_what_is_remembered_of_a_call_holds_none_of_its_tensors(causal: bool) -> None:
    q, k, v = tensors(2, length=11)
    attention(q, k, v, "softmax", is_causal=causal)
    kept = weakref.ref(k)
    del q, k, v
    gc.collect()
    assert kept() is None


def test_scales_are_those_of_key_value_heads_or_of_query_heads_that_agree() -> None:
    q, k, v = tensors(3)
    by_keys = attention(q, k, v, Primal(training_set=Pooled((1, 2, 4))))
    by_queries = attention(q, k, v, Primal(training_set=Pooled((1, 1, 2, 2, 4, 4))))
    torch.testing.assert_close(by_keys, by_queries, rtol=0, atol=0)
    torch.testing.assert_close(attention(q, k, v, "sh"), attention(q, k, v, mechanism("sh", scales=(1, 1, 2))))
    with pytest.raises(ValueError, match=r"query heads 2 to 3 share key/value head 1.*\(2, 4\).*such as \(1, 2, 4\)"):
        attention(q, k, v, Primal(training_set=Pooled((1, 1, 2, 4, 4, 4))))
    with pytest.raises(ValueError, match=r"4 scales .* for 6 query heads in 3 groups; give one scale for each"):
        attention(q, k, v, Primal(training_set=Sparse(Window(2), Pooled((1, 1, 2, 2)))))


def test_numbers_of_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must be a multiple .* got 6 query heads and 4 key/value heads"):
        attention(*tensors(4), "softmax")


def test_scales_of_a_training_set_of_ones_own_agree_within_a_group() -> None:
    class Halves(TrainingSet):
        def head_scales(self, heads: int) -> tuple[int, ...]:
            return tuple(1 + h % 2 for h in range(heads))

    with pytest.raises(ValueError, match="query heads 0 to 1 share key/value head 0"):
        attention(*tensors(3), Primal(training_set=Halves()))


def test_what_is_learned_for_each_query_head_may_differ_within_a_group() -> None:
    q, k, v = tensors(3)
    primal, beta = Primal(inputs=(Recenter(learnable=True),)), torch.linspace(0, 1, HEADS, dtype=torch.float64)
    given, _ = repeated(q, k, v, primal, {})
    expected = attention(*given, parameters={"beta": beta}, impl="reference")
    torch.testing.assert_close(attention(q, k, v, primal, parameters={"beta": beta}), expected)


def test_maps_of_tokens_learn_for_key_value_heads_and_act_on_the_queries_of_a_group_alike() -> None:
    class Stretch(TokenMap):
        def learned(self, heads: int, head_dim: int) -> dict[str, Tensor]:
            return {"stretch": torch.ones(heads, 1, head_dim)}

        def tokens(self, x: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
            return x * parameters["stretch"]

    (q, k, v), primal = tensors(3), Primal(inputs=(Stretch(),), training_set=Pooled((1, 2, 2)))
    stretch = 1 + torch.rand(3, 1, 4, dtype=torch.float64)
    found = attention(q, k, v, primal, parameters={"stretch": stretch})
    expected = attention(q * stretch.repeat_interleave(2, 0), k * stretch, v, mechanism("sh", scales=(1, 2, 2)))
    torch.testing.assert_close(found, expected)


def test_pooling_kernels_are_learned_for_key_value_heads() -> None:
    primal = mechanism("sh", how="conv", scales=(1, 2, 2))
    shapes = {name: tuple(x.shape) for name, x in primal.learned(HEADS, 4, 3).items()}
    assert shapes == {"pool_kernel_2": (2, 2)}


def test_nothing_is_repeated_where_a_groups_queries_are_those_of_one_head() -> None:
    q, k, v = tensors(3)
    together = state(q, k, v, mechanism("bn+sh"))
    assert together.q.shape == (2, 3, 18, 4) and together.k is k and together.copied == 0
    assert together.q.data_ptr() == q.data_ptr()
    step = state(q[:, :, :1], k, v, mechanism("softmax"), is_causal=True, query_offset=8)
    assert step.q.shape == (2, 3, 2, 4) and step.k is k and not step.is_causal


def test_a_plan_counts_the_bytes_of_keys_that_are_repeated() -> None:
    q, k, v = tensors(2)
    given, _ = repeated(q, k, v, mechanism("softmax"), {})
    grouped, whole = plan(q, k, v, "softmax", is_causal=True), plan(*given, is_causal=True)
    read, written = k.numel() + v.numel(), 3 * (k.numel() + v.numel())
    more = grouped.estimates["sdpa"].bytes - whole.estimates["sdpa"].bytes
    assert more == (read + written) * 8


@pytest.mark.parametrize("causal", [False, True])
def test_groups_go_through_a_compiler_vmap_and_autocast(causal: bool) -> None:
    q, k, v = tensors(3, dtype=torch.float32)
    primal = mechanism("bn+sh")
    expected = attention(q, k, v, primal, is_causal=causal)
    compiled = torch.compile(lambda *qkv: attention(*qkv, primal, is_causal=causal), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), expected)
    many = torch.vmap(lambda q, k, v: attention(q, k, v, primal, is_causal=causal, impl="dense"))
    torch.testing.assert_close(many(*(torch.stack([x, 2 * x]) for x in (q, k, v)))[0], expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = attention(q, k, v, primal, is_causal=causal)
    assert relative_error(rounded, expected.double()) < 12 * torch.finfo(torch.bfloat16).eps


def test_the_battery_is_given_the_keys_of_every_query_head_for_its_truth() -> None:
    from support.battery import PRIMALS, Case

    case = Case(9, 9, kv_heads=3)
    truth = outputs_and_gradients(PRIMALS["bn+sh"], case, "reference")
    assert truth["grad k"].shape == (2, 3, 9, 4) and truth["grad k"].abs().amax((0, 2, 3)).min() > 0
