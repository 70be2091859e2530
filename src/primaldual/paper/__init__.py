"""The paper's tables: its numbers, the runs behind them, and what was measured beside."""

from .engine import ENGINES, Engine, Failure, Place, local
from .numbers import Number
from .paired import Outcome
from .recipes import flowformer, mvts, recipe_for
from .report import Cell, Report, report
from .runs import Run, runs
from .tables import Table, table, tables

__all__ = [
    "ENGINES", "Cell", "Engine", "Failure", "Number", "Outcome", "Place", "Report", "Run", "Table", "flowformer",
    "local", "mvts", "recipe_for", "report", "runs", "table", "tables",
]  # fmt: skip
