"""Dropout from a generator of one's own."""

import pytest
import torch

from primaldual.models.dropout import DrawnDropout, draw_from


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_so_many_are_dropped_and_the_mean_stays(p):
    drop, x = DrawnDropout(p), torch.ones(999, 101)
    draw_from(drop, torch.Generator().manual_seed(0))
    found = drop(x)
    assert float((found == 0).float().mean()) == pytest.approx(p, abs=0.01)
    assert float(found.mean()) == pytest.approx(1.0, abs=0.05)
    assert torch.equal(drop.eval()(x), x)


def test_its_generator_decides_and_the_shared_one_is_left_alone():
    drop, x = DrawnDropout(0.5), torch.ones(77, requires_grad=True)
    before = torch.get_rng_state()
    found = []
    for _ in range(2):
        draw_from(torch.nn.Sequential(drop), torch.Generator().manual_seed(3))
        found.append(drop(x))
    assert torch.equal(*found) and torch.equal(torch.get_rng_state(), before)
    (gradient,) = torch.autograd.grad(found[0].sum(), x)
    assert torch.equal(gradient, found[0])
    assert not torch.equal(drop(x), found[0])
