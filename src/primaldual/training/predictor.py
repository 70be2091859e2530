"""What predicts from raw time series: trained models, the preparation of their series, and the names of the classes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..base.threads import on_threads, side_by_side
from ..data import Dataset, Preparation, Split, fill_gaps
from ..models import BankConfig, PatternConfig, SeriesConfig
from ..primal import Spec
from .calibration import calibrated
from .labels import labels_from_json, labels_to_json
from .model_file import ModelFileError, Models, dtype_of, model_of, read, write
from .series import series_tensors

PREDICTED, BEYOND = 1 << 13, 8
"""Steps that a member predicts from at once on a CPU; and so many times more on a GPU."""


@dataclass(frozen=True, eq=False)
class Predictor:
    """Members that predict together.

    Args:
        configs, weights: of every member.
        preparation: of series, as those of the training were prepared.
        classes: labels, in the order of the scores; None for regression.
        target: what predictions are multiplied by, and what is added then.
        about: what else a file is to say, in JSON.
        shares: of every member in what is predicted; all alike unless given.
        temperature: what the logarithms of the probabilities are divided by.
    """

    configs: Sequence[Spec]
    weights: Sequence[Mapping[str, Tensor]]
    preparation: Preparation
    classes: np.ndarray | None
    target: tuple[float, float] = (1.0, 0.0)
    about: Mapping[str, Any] = field(default_factory=dict)
    shares: Sequence[float] | None = None
    temperature: float = 1.0

    def prepared(self, series: Sequence[np.ndarray]) -> Split:
        """Series [length, channels] as the models take them; those that are too long are cut, with a warning."""
        filled = [fill_gaps(np.asarray(one, dtype=np.float64)) for one in series]
        length = self.preparation.length
        if longer := sum(len(one) > length for one in filled):
            warnings.warn(
                f"{longer} of {len(filled)} series are longer than every series of fit: cut to {length} steps",
                stacklevel=6,
            )
        x, lengths = self.preparation.apply(filled)
        return Split(x, lengths, torch.zeros(len(x)))

    def model(self, member: int) -> nn.Module:
        """A member, ready to predict."""
        return model_of(self.configs[member], self.weights[member])

    def outputs(self, series: Sequence[np.ndarray], device: torch.device | str = "cpu", jobs: int = 1) -> Tensor:
        """Of every member from series [length, channels]: scores [members, cases, classes], or [members, cases]."""
        return self.outputs_of(self.prepared(series), device, jobs)

    def outputs_of(self, split: Split, device: torch.device | str = "cpu", jobs: int = 1) -> Tensor:
        """The same of series that are prepared; on a CPU by so many threads, whose number changes nothing."""
        device = torch.device(device)
        on_cpu = device.type == "cpu"
        size = max(1, (PREDICTED if on_cpu else BEYOND * PREDICTED) // split.x.shape[1])
        models, pieces = [self.model(i).to(device) for i in range(len(self.configs))], range(0, len(split), size)

        @torch.no_grad()
        def piece(at: tuple[int, int]) -> Tensor:
            member, first = at
            rows = slice(first, first + size)
            part = Split(split.x[rows], split.lengths[rows], split.y[rows])
            x, padding, _ = series_tensors(part, dtype_of(self.weights[member]), device)
            with on_threads(1) if on_cpu else nullcontext():
                return models[member](x, padding).double().cpu()

        found = side_by_side(piece, [(i, first) for i in range(len(models)) for first in pieces], jobs if on_cpu else 1)
        return torch.cat(found).unflatten(0, (len(models), len(split)))

    def probabilities(
        self, series: Sequence[np.ndarray], device: torch.device | str = "cpu", jobs: int = 1
    ) -> np.ndarray:
        """Of the classes, [cases, classes]: the mean over members by their shares, calibrated."""
        return self.together(self.outputs(series, device, jobs)).numpy()

    def numbers(self, series: Sequence[np.ndarray], device: torch.device | str = "cpu", jobs: int = 1) -> np.ndarray:
        """Predictions in the targets' own unit, [cases]: the mean over members by their shares."""
        return self.together(self.outputs(series, device, jobs)).numpy()

    def together(self, outputs: Tensor) -> Tensor:
        """What is predicted of what members put out: probabilities [cases, classes], or numbers [cases]."""
        shares = torch.tensor(self.shares or [1.0] * len(outputs), dtype=outputs.dtype)
        shares = shares / shares.sum()
        if self.classes is None:
            scale, offset = self.target
            return offset + scale * torch.tensordot(shares, outputs, 1)
        return calibrated(torch.tensordot(shares, outputs.softmax(-1), 1), self.temperature)

    def save(self, path: Path) -> None:
        """Into one file, which is whole or not there."""
        write(path, self.models())

    def models(self) -> Models:
        """As they go to a file."""
        prepared = {"mean": torch.from_numpy(self.preparation.mean), "std": torch.from_numpy(self.preparation.std)}
        said = {
            "length": self.preparation.length, "target": list(self.target),
            "classes": None if self.classes is None else labels_to_json(self.classes),
            "shares": None if self.shares is None else list(self.shares), "temperature": self.temperature,
        }  # fmt: skip
        return Models(self.configs, self.weights, prepared, {"series": said} | dict(self.about))

    @classmethod
    def load(cls, path: Path) -> Predictor:
        """The inverse of `save`; a `ModelFileError` where a file does not hold one."""
        models = read(path)
        said = models.about.get("series")
        if said is None:
            raise ModelFileError(
                f"{path} holds a model, but not how series are prepared for it: it is not of time series, or an "
                f"older version trained it"
            )
        try:
            made = cls._of(models, said)
            for config, weights in zip(made.configs, made.weights, strict=True):
                model_of(config, weights)
        except (ModelFileError, LookupError, TypeError, ValueError, OverflowError) as error:
            raise ModelFileError(f"{path} is damaged: {error}") from None
        return made

    @classmethod
    def _of(cls, models: Models, said: Mapping[str, Any]) -> Predictor:
        configs, (mean, std) = models.configs, (models.beside[name] for name in ("mean", "std"))
        known = [config for config in configs if isinstance(config, SeriesConfig | PatternConfig | BankConfig)]
        if len(known) < len(configs):
            raise ModelFileError("its models are not of time series")
        first, shapes = known[0], {(c.channels, c.length, c.outputs, c.task) for c in known}
        if len(shapes) > 1:
            raise ModelFileError("its members are not of the same series")
        if said["length"] != first.length or not mean.shape == std.shape == (first.channels,):
            raise ModelFileError("its preparation is not that of its models")
        if not (mean.isfinite().all() and std.isfinite().all() and mean.dtype == std.dtype == torch.float64):
            raise ModelFileError("the mean and deviation of its channels are no numbers")
        classes = None if said["classes"] is None else labels_from_json(said["classes"])
        if (classes is None) != (first.task == "regression") or (classes is not None and len(classes) != first.outputs):
            raise ModelFileError("its classes are not those of its models")
        scale, offset = said["target"]
        if not all(type(x) in (int, float) and np.isfinite(x) for x in (scale, offset)):
            raise ModelFileError(f"its targets are in {said['target']!r}")
        shares, temperature = said.get("shares"), said.get("temperature", 1.0)  # files of before have neither
        if shares is not None and not (
            isinstance(shares, list) and len(shares) == len(known) and all(map(_is_share, shares)) and sum(shares) > 0
        ):
            raise ModelFileError(f"its members have the shares {str(shares)[:80]}")
        if type(temperature) not in (int, float) or not 1e-3 <= temperature <= 1e3:
            raise ModelFileError(f"its temperature is {str(temperature)[:80]}")
        preparation = Preparation(mean.numpy(), std.numpy(), first.length)
        others = {name: value for name, value in models.about.items() if name != "series"}
        weights = models.weights
        return cls(list(known), weights, preparation, classes, (scale, offset), others, shares, temperature)


def _is_share(x: Any) -> bool:
    return type(x) in (int, float) and 0 <= x <= 1


def predictor_of(data: Dataset, model: nn.Module, target: tuple[float, float] = (1.0, 0.0)) -> Predictor:
    """A model that was trained on a set, with the preparation and the classes of the set."""
    config: Any = model.config
    preparation = Preparation(data.mean.numpy(), data.std.numpy(), data.length)
    classes = np.array(data.classes) if data.classes else None
    return Predictor([config], [model.state_dict()], preparation, classes, target, {"name": data.name})
