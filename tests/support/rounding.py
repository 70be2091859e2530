"""How far rounding alone carries a result: the measure of what may be asked of a kernel."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from primaldual.ops import dense, linear, reference
from primaldual.ops.problem import Problem

Outcome = tuple[Tensor, Tensor | None]


@contextmanager
def rounded_at_every_step() -> Iterator[None]:
    """Inside, the executors of torch's own operators compute at the tensors' dtype, sums and normalizers too."""
    modules = (reference, linear, dense)
    before = [module.accumulated for module in modules]
    for module in modules:
        module.accumulated = _rounded
    try:
        yield
    finally:
        for module, function in zip(modules, before, strict=True):
            module.accumulated = function


def _rounded(problem: Problem, run: Callable[[Problem], Outcome]) -> Outcome:
    dtype = problem.q.dtype
    parameters = {name: x.to(dtype) for name, x in problem.parameters.items()}
    log_weights = None if problem.log_weights is None else problem.log_weights.to(dtype)
    return run(replace(problem, parameters=parameters, log_weights=log_weights))
