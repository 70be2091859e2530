"""One training loop for any task and for one or many seeds at once, and the records that it leaves."""

from ..base.packages import MissingPackageError
from .augmentation import Augmentation
from .ensemble import Ensemble, check
from .loop import Training
from .modern import ModernModel, ModernRecipe, fit
from .patterns import PatternTask
from .progress import Progress, Watch
from .recipe import Recipe
from .record import Record, Score, key
from .run import train
from .schedule import Constant, Cosine, Linear, OneCycle, Schedule
from .sequences import SequenceTask
from .series import SeriesTask
from .series_recipe import for_cpu, series_recipe
from .store import Store
from .task import Metric, Task
from .text import TextTask
from .text_recipe import text_recipe
from .tuning import Tuned, tune
from .watch import progress_bar, tensorboard

__all__ = [
    "Augmentation", "Constant", "Cosine", "Ensemble", "Linear", "Metric", "MissingPackageError", "ModernModel",
    "ModernRecipe", "OneCycle", "PatternTask", "Progress", "Recipe", "Record", "Schedule", "Score", "SequenceTask",
    "SeriesTask", "Store", "Task", "TextTask", "Training", "Tuned", "Watch", "check", "fit", "for_cpu", "key",
    "progress_bar", "series_recipe", "tensorboard", "text_recipe", "train", "tune",
]  # fmt: skip
