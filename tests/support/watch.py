"""What operators make, read and write."""

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

VIEWS = (
    "view",
    "expand",
    "unsqueeze",
    "squeeze",
    "transpose",
    "slice",
    "detach",
    "alias",
    "permute",
    "split",
    "select",
)


class Watch(TorchDispatchMode):
    """The largest tensor that any operator makes, and what all of them read and write, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.largest = max([self.largest, *(x.untyped_storage().nbytes() for x in made)])
        if not any(view in func.__name__ for view in VIEWS):
            touched = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)] + made
            self.moved += sum(x.numel() * x.element_size() for x in touched)
        return out
