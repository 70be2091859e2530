"""What you state: features Φ, normaliser h, input maps T, training set S, and the primal layer made of them."""

from ._primal import Primal
from ._spec import Spec, UnknownKindError
from .convolutions import DepthwiseConv1d, DepthwiseConv2d
from .features import EluPlusOne, Exponential, FeatureMap, LogKernel, RandomFeatures, Taylor
from .gaussian import Gaussian
from .inputs import BatchNorm, InputMap, Moments, PointMap, PositionMap, Recenter, RmsNorm, TokenMap
from .laplace import Laplace
from .mechanisms import about, as_primal, mechanism, mechanisms
from .normalizers import Gated, KernelSum, Normalizer, Unit
from .patterns import Fixed, Pattern, Strided, Window
from .per_token import PerToken
from .polynomial import Polynomial
from .pooled import Pooled
from .rotary import Rotary
from .scale import Scale
from .sparse import Sparse
from .training_sets import AllKeys, Points, TrainingSet
from .weights import Forget, PointWeights

__all__ = [
    "AllKeys", "BatchNorm", "DepthwiseConv1d", "DepthwiseConv2d", "EluPlusOne", "Exponential", "FeatureMap", "Fixed",
    "Forget", "Gated", "Gaussian", "InputMap", "KernelSum", "Laplace", "LogKernel", "Moments", "Normalizer", "Pattern",
    "PerToken", "PointMap", "PointWeights", "Points", "Polynomial", "Pooled", "PositionMap", "Primal",
    "RandomFeatures", "Recenter", "RmsNorm", "Rotary", "Scale", "Sparse", "Spec", "Strided", "Taylor", "TokenMap",
    "TrainingSet", "Unit", "UnknownKindError", "Window", "about", "as_primal", "mechanism", "mechanisms",
]  # fmt: skip
