"""The folder of a comparison: one JSON file for every fit, whole or not there, with a checksum of all that it says."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...base.files import write_json
from ...training.record_checks import CHECKSUM, checksum
from .job import Job

logger = logging.getLogger(__name__)

Record = dict[str, Any]
"""What was asked for (`Job.identity`), and its `scores`, seconds and memory; or its `failure` in words."""


@dataclass(frozen=True)
class Store:
    """`records/<set>/<method>/….json`, `locks/` while fits are running, and `logs/` of those that failed."""

    folder: Path

    def record(self, job: Job) -> Record | None:
        """What is recorded of a job; a damaged file counts as none, with a warning."""
        path = self.path(job)
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and record.get(CHECKSUM) == checksum(record) and record.get("key") == job.key:
            return record
        logger.warning("%s is damaged, and is measured anew", path)
        return None

    def add(self, job: Job, result: dict[str, Any], about: dict[str, Any]) -> Record:
        """Keep what came of a job; `about` is what figures depend on."""
        asked = {"key": job.key, **job.identity(), "kind": job.kind, "method": job.method}
        said = asked | result | {"environment": about}
        record = {CHECKSUM: checksum(said)} | said
        write_json(self.path(job), record)
        return record

    def path(self, job: Job) -> Path:
        """The file of a job."""
        return self.folder / "records" / f"{job.place}.json"

    def lock(self, job: Job) -> Path:
        """What the process holds that has a job in hand."""
        return self.folder / "locks" / f"{job.key}.lock"

    def log(self, job: Job) -> Path:
        """What a fit prints; it stays where the fit fails."""
        return self.folder / "logs" / f"{job.place}.log"
