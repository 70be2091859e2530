"""What scaled heads save: FLOPs, memory and time of the Retrieval model, counted and measured."""

from .setting import BASELINES, MECHANISMS, Setting

__all__ = ["BASELINES", "MECHANISMS", "Setting"]
