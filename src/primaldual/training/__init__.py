"""One training loop for one or many seeds at once, and the records that it leaves."""

from ..base.packages import MissingPackageError
from .ensemble import Ensemble
from .loop import Report, Training, Watch
from .recipe import Recipe, flowformer, for_cpu, mvts, recipe_for
from .record import Record, Score, key
from .run import train
from .store import Store
from .tune import Tuned, tune
from .watch import progress_bar, tensorboard

__all__ = [
    "Ensemble", "MissingPackageError", "Recipe", "Record", "Report", "Score", "Store", "Training", "Tuned", "Watch",
    "flowformer", "for_cpu", "key", "mvts", "progress_bar", "recipe_for", "tensorboard", "train", "tune",
]  # fmt: skip
