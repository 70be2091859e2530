"""What you state: features Φ, normaliser h, input maps T, training set S, and the primal layer made of them."""

from ._primal import Primal
from ._spec import Spec, UnknownKindError
from .convolutions import DepthwiseConv1d, DepthwiseConv2d
from .features import EluPlusOne, Exponential, FeatureMap, RandomFeatures, Taylor
from .inputs import BatchNorm, InputMap, Moments, PointMap, PositionMap, Recenter, RmsNorm, TokenMap
from .laplace import Laplace
from .mechanisms import about, as_primal, mechanism, mechanisms
from .normalizers import KernelSum, Normalizer, Unit
from .patterns import Fixed, Pattern, Strided, Window
from .pooled import Pooled
from .rotary import Rotary
from .scale import Scale
from .sparse import Sparse
from .training_sets import AllKeys, Points, TrainingSet

__all__ = [
    "AllKeys", "BatchNorm", "DepthwiseConv1d", "DepthwiseConv2d", "EluPlusOne", "Exponential", "FeatureMap",
    "Fixed", "InputMap", "KernelSum", "Laplace", "Moments", "Normalizer", "Pattern", "PointMap", "Points", "Pooled",
    "PositionMap", "Primal", "RandomFeatures", "Recenter", "RmsNorm", "Rotary", "Scale", "Sparse", "Spec",
    "Strided", "Taylor", "TokenMap", "TrainingSet", "Unit", "UnknownKindError", "Window", "about", "as_primal",
    "mechanism", "mechanisms",
]  # fmt: skip
