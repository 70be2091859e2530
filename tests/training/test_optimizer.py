"""Every optimiser under every schedule is torch's, step by step."""

from collections.abc import Callable

import pytest
import torch
from torch.optim import RAdam, lr_scheduler

from primaldual.training import Constant, Cosine, Linear, OneCycle, Schedule
from primaldual.training.optimizer import Optimizer

STEPS, RATE = 40, 1e-2
Make = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]


def warmed(steps: int, then: Make) -> Make:
    """torch's warm-up over so many steps, and another schedule after it."""

    def make(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        rise = lr_scheduler.LinearLR(optimizer, 1 / steps, 1.0, steps - 1)
        return lr_scheduler.SequentialLR(optimizer, [rise, then(optimizer)], [steps])

    return make


def one_cycle(**settings) -> Make:
    return lambda optimizer: lr_scheduler.OneCycleLR(optimizer, RATE, STEPS, **settings)


SCHEDULES: dict[str, tuple[Schedule, Make]] = {
    "constant": (Constant(), lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
    "cosine": (Cosine(), lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS)),
    "warm-up, cosine to a floor": (
        Cosine(warmup=7, floor=0.1),
        warmed(7, lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS - 7, 0.1 * RATE)),
    ),
    "linear": (Linear(), lambda optimizer: lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)),
    "warm-up, linear to a floor": (
        Linear(warmup=5, floor=0.2),
        warmed(5, lambda optimizer: lr_scheduler.LinearLR(optimizer, 1.0, 0.2, STEPS - 5)),
    ),
    "one cycle": (OneCycle(), one_cycle()),
    "one cycle, other settings": (
        OneCycle(0.45, 10.0, 100.0, 0.7, 0.9, "linear"),
        one_cycle(
            pct_start=0.45,
            div_factor=10.0,
            final_div_factor=100.0,
            base_momentum=0.7,
            max_momentum=0.9,
            anneal_strategy="linear",
        ),
    ),
    "one cycle, constant β": (OneCycle(low=0.9, high=0.9), one_cycle(cycle_momentum=False)),
}
TORCHS = {"radam": RAdam, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


@pytest.mark.parametrize(("kind", "decay"), [("radam", 0.0), ("adam", 0.0), ("adamw", 0.0), ("adamw", 0.3)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_step_is_torchs(name, kind, decay):
    schedule, make = SCHEDULES[name]
    start = torch.randn(3, 5, dtype=torch.float64)
    mine, theirs = start.clone(), start.clone()
    mine.grad = torch.zeros_like(mine)
    ours = Optimizer(mine, kind, RATE, STEPS, schedule, decay)
    of_torch = TORCHS[kind]([theirs], lr=RATE, weight_decay=decay)
    of_torch_s = make(of_torch)
    for _ in range(STEPS):
        theirs.grad = torch.randn_like(theirs)
        mine.grad.copy_(theirs.grad)
        ours.step()
        of_torch.step()
        of_torch_s.step()
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-13)
    assert not torch.equal(mine, start)


def test_after_the_last_step_its_coefficients_are_used_again():
    matrix = torch.ones(1, 4, dtype=torch.float64)
    matrix.grad = torch.zeros_like(matrix)
    optimizer = Optimizer(matrix, "adamw", 1e-2, 3, Linear(floor=0.5), weight_decay=1.0)
    seen = []
    for _ in range(5):
        before = matrix.clone()
        optimizer.step()
        seen.append((matrix / before)[0, 0].item())
    assert seen[2] == pytest.approx(seen[3]) == pytest.approx(seen[4]) and seen[1] < seen[2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cosine(warmup=-1), "Cosine: warmup must be an integer of at least 0, got -1"),
        (lambda: Linear(floor=2.0), r"Linear: floor must be in \[0, 1\], got 2.0"),
        (lambda: OneCycle(rise=1.0), r"OneCycle: rise must be in \(0, 1\), got 1.0"),
        (lambda: OneCycle(start=0.0), "OneCycle: start must be a positive number"),
        (lambda: OneCycle(anneal="cosine"), "anneal must be one of cos, linear"),
    ],
)
def test_schedules_that_cannot_be_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_weights_that_do_not_decay_are_torchs_in_a_group_of_their_own():
    start = torch.randn(3, 6, dtype=torch.float64)
    decayed = torch.tensor([True, True, False, True, False, False])
    mine, theirs, free = start.clone(), start[:, decayed].clone(), start[:, ~decayed].clone()
    mine.grad = torch.zeros_like(mine)
    ours = Optimizer(mine, "adamw", RATE, STEPS, weight_decay=0.3, square_beta=0.95, decayed=decayed)
    groups = [{"params": [theirs], "weight_decay": 0.3}, {"params": [free], "weight_decay": 0.0}]
    of_torch = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    for _ in range(STEPS):
        mine.grad.copy_(torch.randn_like(mine))
        theirs.grad, free.grad = mine.grad[:, decayed], mine.grad[:, ~decayed]
        ours.step()
        of_torch.step()
    torch.testing.assert_close(mine[:, decayed], theirs, rtol=0, atol=1e-13)
    torch.testing.assert_close(mine[:, ~decayed], free, rtol=0, atol=1e-13)
