"""One training loop for any task and for one or many seeds at once, and the records that it leaves."""

from ..base.packages import MissingPackageError
from .augmentation import Augmentation
from .ensemble import Ensemble, check
from .loop import Training
from .modern import ModernRecipe
from .modern_fit import fit
from .modern_model import ModernModel
from .patterns import PatternTask
from .progress import Progress, Watch
from .recipe import Recipe
from .record import Record, RecordError, Score, key
from .run import train
from .schedule import Constant, Cosine, Linear, OneCycle, Schedule
from .sequences import SequenceTask
from .series import SeriesTask
from .series_recipe import in_minutes, series_recipe
from .store import Store
from .task import Metric, Task
from .text import TextTask
from .text_recipe import text_recipe
from .tuning import Tuned, tune
from .watch import csv_log, log_lines, progress_bar, tensorboard

__all__ = [
    "Augmentation", "Constant", "Cosine", "Ensemble", "Linear", "Metric", "MissingPackageError", "ModernModel",
    "ModernRecipe", "OneCycle", "PatternTask", "Progress", "Recipe", "Record", "RecordError", "Schedule", "Score",
    "SequenceTask", "SeriesTask", "Store", "Task", "TextTask", "Training", "Tuned", "Watch", "check", "csv_log", "fit",
    "in_minutes", "key", "log_lines", "progress_bar", "series_recipe", "tensorboard", "text_recipe", "train", "tune",
]  # fmt: skip
