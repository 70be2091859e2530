"""The paper's tables: its numbers, the jobs behind them, and what was measured beside."""

from .comparison import Cell, Comparison, compare
from .engine import ENGINES, Engine, Failure, Place, local
from .job import Job, jobs, recorded
from .numbers import MeanStd
from .paired import Outcome
from .recipes import flowformer, mvts, recipe_for
from .tables import Table, table, table_names

__all__ = [
    "ENGINES", "Cell", "Comparison", "Engine", "Failure", "Job", "MeanStd", "Outcome", "Place", "Table", "compare",
    "flowformer", "jobs", "local", "mvts", "recipe_for", "recorded", "table", "table_names",
]  # fmt: skip
