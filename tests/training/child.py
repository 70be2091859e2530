"""A training run in a process of its own, slow enough to be killed: python child.py FOLDER SETTINGS."""

import json
import os
import signal
import sys
import time
from typing import Any

import torch

from primaldual.training import Ensemble, Record, Store, train
from training.tasks import Words, quick
from training.toy import small, toy


def slow_down(pause: float) -> None:
    """Wait before every step, and say when it is done."""
    step = Ensemble.step

    def slow(self: Ensemble, *given: Any) -> None:
        time.sleep(pause)
        step(self, *given)
        print("step", flush=True)

    Ensemble.step = slow


def die_after_a_record() -> None:
    """Kill this process when the first record is written."""
    add = Store.add

    def last_words(self: Store, record: Record) -> None:
        add(self, record)
        os.kill(os.getpid(), signal.SIGKILL)

    Store.add = last_words


def main(folder: str, settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    slow_down(settings.pop("pause"))
    if settings.pop("die_after_record", False):
        die_after_a_record()
    every, seeds = settings.pop("every"), settings.pop("seeds")
    if settings.pop("words", False):
        train(Words(), recipe=quick(**settings), seeds=seeds, folder=folder, every=every)
    else:
        train(toy(), "bn+sh", small(**settings), seeds, folder=folder, every=every)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
