"""How far rounding alone carries a result: the measure of what may be asked of a kernel."""

from collections.abc import Iterator
from contextlib import contextmanager

from primaldual.ops import dense, linear, reference


@contextmanager
def rounded_at_every_step() -> Iterator[None]:
    """Inside, the executors of torch's own operators compute at the tensors' dtype, sums and normalizers too."""
    modules = (reference, linear, dense)
    before = [module.accumulated for module in modules]
    for module in modules:
        module.accumulated = lambda problem, run: run(problem)
    try:
        yield
    finally:
        for module, function in zip(modules, before, strict=True):
            module.accumulated = function
