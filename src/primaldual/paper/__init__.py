"""The paper's tables: its numbers, the runs behind them, and what was measured beside."""

from .engine import ENGINES, Engine, Place, Problem, local
from .numbers import Number
from .paired import Outcome
from .report import Cell, Report, report
from .runs import Run, runs
from .tables import Table, table, tables

__all__ = [
    "ENGINES", "Cell", "Engine", "Number", "Outcome", "Place", "Problem", "Report", "Run", "Table", "local", "report",
    "runs", "table", "tables",
]  # fmt: skip
