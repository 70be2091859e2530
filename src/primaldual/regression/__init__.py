"""The regression behind the attention: solve it, certify it, and read it back from a head."""

from ..svr.certificate import Certificate
from ..svr.design import PerQueryError
from ..svr.fit import Fit, KernelError, NotConvergedWarning, fit
from .calls import NoAttentionError
from .certification import Certification, Check
from .claims import certify
from .diagnosing import diagnose
from .diagnosis import Diagnosis, HeadRow
from .distance import head_distance
from .distances import HeadDistances, LayerDistances
from .recovery import Recovered, recover

__all__ = [
    "Certificate", "Certification", "Check", "Diagnosis", "Fit", "HeadDistances", "HeadRow", "KernelError",
    "LayerDistances", "NoAttentionError", "NotConvergedWarning", "PerQueryError", "Recovered", "certify", "diagnose",
    "fit", "head_distance", "recover",
]  # fmt: skip
