"""What is drawn belongs to a training alone: threads do not take numbers from each other, nor from who calls."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

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


def test_a_model_starts_from_its_seed_as_it_would_from_the_process_s():
    torch.manual_seed(5)
    expected = torch.nn.TransformerEncoderLayer(8, 2, 8).state_dict()
    before = torch.get_rng_state()
    with DrawingFrom(torch.Generator().manual_seed(5)):
        found = torch.nn.TransformerEncoderLayer(8, 2, 8).state_dict()
    assert all(torch.equal(found[name], x) for name, x in expected.items())
    assert torch.equal(torch.get_rng_state(), before)
