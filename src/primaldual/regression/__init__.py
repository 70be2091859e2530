"""The regression behind the attention: solve it, certify it, and read it back from a head."""

from .capture import NoAttentionError
from .certificate import Certificate
from .certification import Certification, Check
from .certify import certify
from .design import PerQueryError
from .diagnose import diagnose
from .diagnosis import Diagnosis, HeadRow
from .fit import Fit, KernelError, NotConvergedWarning, fit
from .recover import Recovered, recover

__all__ = [
    "Certificate", "Certification", "Check", "Diagnosis", "Fit", "HeadRow", "KernelError", "NoAttentionError",
    "NotConvergedWarning", "PerQueryError", "Recovered", "certify", "diagnose", "fit", "recover",
]  # fmt: skip
