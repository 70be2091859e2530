"""The plan picks the cheapest executor that can, and says why."""

import pytest
import torch

from primaldual import mechanism, mechanisms
from primaldual.ops import plan
from primaldual.primal import Pattern, Sparse

q = torch.randn(1, 8, 9, 4)
EXPECTED = dict.fromkeys(mechanisms(), "sdpa")
EXPECTED |= {name: "linear" for name in mechanisms() if name.startswith("linear")}
EXPECTED |= {name: "block_sparse" for name in mechanisms() if name.startswith("sparse")}


@pytest.mark.parametrize("name", mechanisms())
def test_each_mechanism_has_its_executor(name: str) -> None:
    long = torch.randn(1, 8, 1024, 4)
    chosen = plan(long, long, long, name)
    assert chosen.impl == EXPECTED[name]
    assert chosen.reason in chosen.explain()
    assert ("not linear" in chosen.explain()) == (chosen.impl != "linear")


@pytest.mark.parametrize("name", mechanisms())
def test_weights_take_the_reference(name: str) -> None:
    assert plan(q, q, q, name, need_weights=True).impl == "reference"


def test_a_mask_per_query_takes_linear_attention_to_the_reference() -> None:
    mask = torch.zeros(9, 9, dtype=torch.bool)
    chosen = plan(q, q, q, "linear", attn_mask=mask)
    assert chosen.impl == "reference"
    assert "not linear: an attn_mask gives every query its own keys" in chosen.explain()


def test_few_keys_are_not_worth_taking_apart() -> None:
    chosen = plan(q, q, q, "sparse")
    assert chosen.impl == "sdpa"
    assert "not block_sparse: 12 of 9 keys in pieces cost more than the dense mask" in chosen.explain()
    assert plan(q, q, q, "sparse", impl="block_sparse").impl == "block_sparse"


def test_a_pattern_of_one_s_own_runs_on_the_dense_mask() -> None:
    class Even(Pattern):
        def allows(self, i, j, length):
            return (i + j) % 2 == 0

    primal = mechanism("softmax").__class__(training_set=Sparse(Even()))
    assert plan(q, q, q, primal).impl == "sdpa"
    assert "Pattern.pieces" in plan(q, q, q, primal).explain()
