"""What is drawn belongs to a training alone: threads do not take numbers from each other, nor from who calls."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from primaldual.base.randomness import DrawingFrom, dropout
from primaldual.training import Record, train
from training.tasks import Sums, quick
from training.toy import small, toy

RUNS: dict[str, Callable[[int], list[Record]]] = {
    "series": lambda seed: train(toy(), "bn+sh", small(dropout=0.3), (seed,)),
    "dropout of a finite kernel": lambda seed: train(toy(), "linear", small(dropout=0.3), (seed,)),
    "a task of one's own": lambda seed: train(Sums(p=0.3), recipe=quick(epochs=4), seeds=(seed,)),
}


@pytest.mark.parametrize("name", RUNS)
def test_in_threads_a_seed_gives_what_it_gives_alone_and_the_caller_draws_on(name):
    alone = [RUNS[name](seed)[0].history for seed in (0, 1)]
    torch.manual_seed(7)
    before = torch.get_rng_state()
    with ThreadPoolExecutor(4) as pool:
        found = [records[0].history for records in pool.map(RUNS[name], [0, 1] * 4)]
    assert found == alone * 4
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("make", [lambda x: x, lambda x: x.transpose(0, 2), lambda x: x[..., ::2], lambda x: x[:1]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_dropout_is_torch_s_to_the_bit(make, dtype):
    x = make(torch.randn(5, 7, 6)).to(dtype).requires_grad_()
    ours = dropout(x, 0.3, True, torch.Generator().manual_seed(5))
    torch.manual_seed(5)
    theirs = torch.dropout(x, 0.3, True)
    assert torch.equal(ours, theirs)
    assert torch.equal(*(torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for y in (ours, theirs)))


DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "rand": lambda: torch.rand(3, 4),
    "randn": lambda: torch.randn(3, 4, dtype=torch.float64),
    "randint": lambda: torch.randint(9, (20,)),
    "randint from": lambda: torch.randint(-5, 9, (20,)),
    "randperm": lambda: torch.randperm(20),
    "rand_like": lambda: torch.rand_like(torch.ones(5)),
    "randn_like": lambda: torch.randn_like(torch.ones(5)),
    "randint_like": lambda: torch.randint_like(torch.ones(5), 9),
    "normal": lambda: torch.normal(torch.zeros(5), 1.0),
    "normal of a size": lambda: torch.normal(0.0, 1.0, (5,)),
    "bernoulli": lambda: torch.bernoulli(torch.full((9,), 0.5)),
    "multinomial": lambda: torch.multinomial(torch.ones(9), 4),
    "poisson": lambda: torch.poisson(torch.ones(9)),
    "exponential": lambda: torch.empty(9).exponential_(),
    "uniform": lambda: torch.empty(9).uniform_(),
    "orthogonal": lambda: torch.nn.init.orthogonal_(torch.empty(4, 4)),
    "truncated": lambda: torch.nn.init.trunc_normal_(torch.empty(9)),
    "dropout": lambda: torch.dropout(torch.ones(9), 0.5, True),
    "alpha dropout": lambda: torch.alpha_dropout(torch.ones(9), 0.5, True),
    "dropout of channels": lambda: torch.feature_dropout(torch.ones(2, 9, 3), 0.5, True),
    "rrelu": lambda: torch.rrelu(-torch.ones(9), training=True),
    "attention": lambda: scaled_dot_product_attention(*[torch.ones(1, 1, 4, 8)] * 3, dropout_p=0.5),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("gradients", [False, True])
def test_whatever_torch_draws_is_the_generator_s(name, gradients):
    with torch.set_grad_enabled(gradients):
        torch.manual_seed(5)
        expected = DRAWS[name](), DRAWS[name]()
        torch.manual_seed(6)
        before, own = torch.get_rng_state(), torch.Generator().manual_seed(5)
        with DrawingFrom(own):
            found = DRAWS[name](), DRAWS[name]()
    assert all(map(torch.equal, found, expected))
    assert torch.equal(torch.get_rng_state(), before)
    with DrawingFrom(own):  # one that is given stays in its place
        drawn = torch.rand(3, generator=torch.Generator().manual_seed(1))
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(1)))


def test_a_model_starts_from_its_seed_as_it_would_from_the_process_s():
    torch.manual_seed(5)
    expected = torch.nn.TransformerEncoderLayer(8, 2, 8).state_dict()
    before = torch.get_rng_state()
    with DrawingFrom(torch.Generator().manual_seed(5)):
        found = torch.nn.TransformerEncoderLayer(8, 2, 8).state_dict()
    assert all(torch.equal(found[name], x) for name, x in expected.items())
    assert torch.equal(torch.get_rng_state(), before)
