"""The regression behind the attention: solve it, certify it, and read it back from a head."""

from .certificate import Certificate
from .design import PerQueryError
from .fit import Fit, KernelError, NotConvergedWarning, fit
from .recover import Recovered, recover

__all__ = ["Certificate", "Fit", "KernelError", "NotConvergedWarning", "PerQueryError", "Recovered", "fit", "recover"]
