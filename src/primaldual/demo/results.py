"""Everything the demo measured, and its summary."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from ..base.spread import Spread, spread
from ..data import Dataset
from ..dual import Expansion
from ..models import SeriesConfig
from ..primal import Recenter
from .checks import Check
from .members import Member
from .output import MARK
from .settings import DATASET, PAPER, Settings, model_config

MEGA = 1e6


@dataclass
class Results:
    """One demo: what was derived, checked and trained. Mechanisms keep their order throughout."""

    settings: Settings
    command: str
    data: Dataset
    expansions: dict[str, Expansion]
    started: datetime
    environment: dict[str, Any]
    checks: list[Check] = field(default_factory=list)
    members: list[Member] = field(default_factory=list)
    sweep: list[Member] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def config(self) -> SeriesConfig:
        """The model, with softmax; that of the others has the same sizes."""
        return model_config(self.settings.recipe, self.data, self.expansions["softmax"].primal)

    @property
    def attention_shape(self) -> dict[str, int]:
        """Of every attention layer."""
        return {"heads": self.config.heads, "head_dim": self.config.d_model // self.config.heads}

    def of(self, mechanism: str) -> list[Member]:
        """The models of a mechanism, by seed."""
        return [member for member in self.members if member.mechanism == mechanism]

    def accuracy(self, mechanism: str) -> Spread:
        """Test accuracy after the last epoch, in percent."""
        return spread([member.accuracy for member in self.of(mechanism)])

    def head_distance(self, mechanism: str) -> Spread:
        """Distance between heads after the last epoch."""
        return spread([member.head_distance for member in self.of(mechanism)])

    def cpu_seconds(self, mechanism: str) -> float:
        """CPU time per seed."""
        return statistics.fmean(member.seconds for member in self.of(mechanism))

    def by_beta(self) -> dict[float, list[Member]]:
        """The sweep: softmax is β = 0, `bn` its own β; each β with the seeds that all of them share."""
        if not self.sweep:
            return {}
        seeds = {member.seed for member in self.sweep}
        found = [(0.0, member) for member in self.of("softmax")]
        found += [(_beta(member), member) for member in self.of("bn") + self.sweep]
        grouped: dict[float, list[Member]] = {}
        for beta, member in sorted(found, key=lambda pair: (pair[0], pair[1].seed)):
            if member.seed in seeds:
                grouped.setdefault(beta, []).append(member)
        return grouped

    def flops(self, mechanism: str, rewritten: bool) -> int:
        """Forward FLOPs of attention per series, all layers: key and value projections, input maps, the sum."""
        length, expansion = self.data.length, self.expansions[mechanism]
        cost = (expansion if rewritten else expansion.as_written).cost(
            queries=length, keys=length, **self.attention_shape
        )
        return self.config.layers * cost.total

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types; attention maps are left out."""
        return {
            "what": MARK,
            "command": self.command,
            "started": self.started.isoformat(timespec="seconds"),
            "seconds": round(self.seconds, 2),
            "environment": self.environment,
            "settings": self.settings.to_dict(),
            "data": {"name": DATASET, "sha256": self.data.hash, "classes": list(self.data.classes)},
            "summary": {name: self._summary(name) for name in self.expansions},
            "checks": [check._asdict() for check in self.checks],
            "runs": [member.to_dict() for member in self.members],
            "sweep": [member.to_dict() for member in self.sweep],
            "notes": self.notes,
        }

    def _summary(self, name: str) -> dict[str, Any]:
        return {
            "accuracy": self.accuracy(name)._asdict(),
            "paper": PAPER[name]._asdict(),
            "parameters": self.of(name)[0].record.parameters,
            "flops": {"before": self.flops(name, rewritten=False), "after": self.flops(name, rewritten=True)},
            "cpu_seconds": self.cpu_seconds(name),
            "head_distance": self.head_distance(name)._asdict(),
            "rewrites": [rewrite.name for rewrite in self.expansions[name].rewrites],
        }


def _beta(member: Member) -> float:
    (recentered,) = member.primal.inputs
    assert isinstance(recentered, Recenter)
    return recentered.beta
