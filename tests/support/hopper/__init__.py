"""Kernels as they are compiled for Hopper, run on a CPU.

Triton's interpreter runs what a kernel says, in numpy: not what the compiler makes of it, not its inline assembly, and
no bfloat16. Here the PTX runs, and what a GPU would not forgive is a `HopperError`. What ptxas makes of the PTX is not
seen: once its machine code was wrong where the PTX was right (docs/kernels.md).
"""

from .driver import hopper as hopper
from .memory import HopperError as HopperError
