"""Records that no training made."""

from collections.abc import Sequence

from primaldual.data import manifest
from primaldual.paper import Job
from primaldual.training import Record
from primaldual.training.recipe import VERSION


def record(job: Job, seed: int, values: Sequence[float], failure: str | None = None, data: str = "data") -> Record:
    """Of a member with these values on the test set; without a failure the last is that of the last epoch."""
    entry, epochs = manifest()[job.dataset], job.recipe.epochs
    at = list(range(1, len(values) + 1)) if failure else [*range(1, len(values)), epochs]
    return Record(
        f"{job.dataset}-{job.mechanism}-{seed}-{data}", VERSION,
        {"name": job.dataset, "hash": data, "train": entry.cases[0][0], "test": entry.cases[0][1]},
        job.primal.to_dict(), job.recipe.to_dict(), seed, [seed], "accuracy" if entry.classes else "rmse",
        {"epoch": at, "loss": [0.0] * len(values), "test": list(values)}, failure, 1, 1.0, None, {},
        bool(entry.classes),
    )  # fmt: skip
