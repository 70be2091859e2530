"""The folder of runs: records, trained models and checkpoints; every file is whole or not there."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from ..base.files import write_bytes, write_json
from ..models import MODELS
from ..primal import Spec
from .record import Record
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
        return [_read_record(path) for path in sorted(self.folder.glob("*.json"))]

    def add(self, record: Record) -> None:
        """Keep a finished run."""
        write_json(self.folder / f"{record.key}.json", record.to_dict())

    def add_model(self, key: str, model: nn.Module) -> None:
        """Keep the weights of a run."""
        config: Any = getattr(model, "config", None)
        about = {"config": config.to_dict()} if type(config) in MODELS else {}
        write(self.folder / "models" / f"{key}.safetensors", model.state_dict(), about)

    def model(self, key: str) -> nn.Module:
        """The model of a finished run, if it is of a family of `primaldual.models`, ready to predict."""
        tensors, about = read(self.folder / "models" / f"{key}.safetensors")
        if "config" not in about:
            raise ValueError(
                f"{key} is no model of primaldual.models; load its weights into one of its task, by load_model"
            )
        config = Spec.from_dict(about["config"])
        model = MODELS[type(config)](config).to(_dtype(tensors))
        model.load_state_dict(tensors)
        return model.eval()

    def load_model(self, key: str, task: Task) -> nn.Module:
        """The model of a finished run of any task, ready to predict."""
        tensors, _ = read(self.folder / "models" / f"{key}.safetensors")
        model = built(task, 0)
        model.to(_dtype(tensors)).load_state_dict(tensors)
        return model.eval()

    def checkpoint(self, configuration: str, group: str) -> Path:
        """Where a group of members is kept while it trains."""
        return self.folder / "checkpoints" / f"{configuration}-{group}.safetensors"

    def checkpoints(self, configuration: str) -> Iterator[tuple[Path, dict[str, Tensor], dict[str, Any]]]:
        """Those of one configuration; a damaged one is left out, with a warning."""
        for path in sorted((self.folder / "checkpoints").glob(f"{configuration}-*.safetensors")):
            try:
                yield path, *read(path)
            except FileNotFoundError:  # another process has ended that run
                continue
            except (SafetensorError, OSError, KeyError, ValueError) as error:
                logger.warning("%s is damaged (%s); its members start anew", path, error)


def _dtype(tensors: dict[str, Tensor]) -> torch.dtype:
    """Of a model's weights."""
    return next((x.dtype for x in tensors.values() if x.is_floating_point()), torch.float32)


def _read_record(path: Path) -> Record:
    try:
        return Record.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged, or not the record of a run ({type(error).__name__}: {error}); take it out of the "
            f"folder, or choose another folder"
        ) from None


def write(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Tensors, and what goes into JSON beside them."""
    held: dict[str, Tensor] = {}
    places = set[int]()
    for name, x in tensors.items():
        x = x.detach().cpu().contiguous()
        held[name] = x.clone() if x.data_ptr() in places else x  # weights that a model has twice
        places.add(x.data_ptr())
    # not save_file, which has scratch files of its own
    write_bytes(path, save(held, metadata={"primaldual": json.dumps(about)}))


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `write` wrote."""
    with safe_open(path, framework="pt") as stream:
        about = json.loads((stream.metadata() or {})["primaldual"])
        return {name: stream.get_tensor(name) for name in stream.keys()}, about  # noqa: SIM118  not a dict
