"""The folder of runs: records, trained models and checkpoints; every file is whole or not there."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..base.files import write_json
from ..base.tensors import DamagedFileError, read
from ..models import MODELS
from . import model_file
from .model_file import Models, dtype_of, model_of
from .record import Record, RecordError
from .record_checks import CHECKSUM, checksum
from .task import Task, built

logger = logging.getLogger(__name__)


class Store:
    """A folder: `<key>.json` and `models/<key>.safetensors` of every seed of a run, and `checkpoints/`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def record(self, key: str) -> Record | None:
        """A finished run, if it is there."""
        path = self.folder / f"{key}.json"
        return _read_record(path) if path.is_file() else None

    def records(self) -> list[Record]:
        """Every finished run."""
        return [_read_record(path) for path in sorted(self.folder.glob("*.json")) if self._is_named_as_record(path)]

    @staticmethod
    def _is_named_as_record(path: Path) -> bool:
        """Whether a file has the name of a run; others are someone else's, and left alone."""
        named = re.fullmatch("[0-9a-f]{20}", path.stem) is not None
        if not named:
            logger.warning("%s has not the name of a record, and is left aside", path)
        return named

    def add(self, record: Record) -> None:
        """Keep a finished run."""
        said = record.to_dict()
        write_json(self.folder / f"{record.key}.json", {CHECKSUM: checksum(said)} | said)

    def add_model(self, key: str, model: nn.Module, models: Models | None = None) -> None:
        """Keep the model of a run; as its task would have it kept, where that is given."""
        config = getattr(model, "config", None)
        alone = Models([config if type(config) in MODELS else None], [model.state_dict()])
        model_file.write(self._model(key), alone if models is None else models)

    def model(self, key: str) -> nn.Module:
        """The model of a finished run, if it is of a family of `primaldual.models`, ready to predict."""
        models = model_file.read(self._model(key))
        return model_of(models.configs[0], models.weights[0])

    def load_model(self, key: str, task: Task) -> nn.Module:
        """The model of a finished run of any task, ready to predict."""
        weights = model_file.read(self._model(key)).weights[0]
        model = built(task, 0)
        model.to(dtype_of(weights)).load_state_dict(dict(weights))
        return model.eval()

    def _model(self, key: str) -> Path:
        return self.folder / "models" / f"{key}.safetensors"

    def checkpoint(self, configuration: str, group: str) -> Path:
        """Where a group of members is kept while it trains."""
        return self.folder / "checkpoints" / f"{configuration}-{group}.safetensors"

    def lease(self, key: str) -> Path:
        """What the process holds that trains a run."""
        return self.folder / "checkpoints" / f"{key}.lock"

    def checkpoints(self, configuration: str) -> Iterator[tuple[Path, dict[str, Tensor], dict[str, Any]]]:
        """Those of one configuration; a damaged one is left out, with a warning."""
        for path in sorted((self.folder / "checkpoints").glob(f"{configuration}-*.safetensors")):
            try:
                found = read(path)
            except FileNotFoundError:  # another process has ended that run
                continue
            except (DamagedFileError, OSError) as error:
                logger.warning("%s; its members start anew", error)
                continue
            yield path, *found


def _read_record(path: Path) -> Record:
    try:
        record = Record.from_dict(json.loads(path.read_text(encoding="utf-8")))
        if record.key != path.stem:
            raise RecordError(f"it is that of {record.key[:80]}")
    except (ValueError, RecursionError) as error:
        raise RecordError(
            f"{path} is damaged, or not the record of a run ({error}); take it out of the folder, and it is run again, "
            f"or choose another folder"
        ) from None
    return record
