"""A process for one fit: its memory and its threads are its own, it can be stopped, and it ends with its parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterable
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ...base.environment import without_paths
from ...base.files import remove
from .fit import Task, measured

# processes are forked off one that has imported what they need, and has no threads yet
_FORKS = "forkserver" in multiprocessing.get_all_start_methods()


BEGUN = {"begun": True}
"""What a process says once it has its series."""


class Worker:
    """Begins with a task; `result` is there once it has ended.

    Args:
        log: what the fit prints; taken away where it succeeds.
        limit: seconds, from when it has its series to its end; None for none.
        memory: bytes of data, its libraries' included; None for any.
    """

    def __init__(self, task: Task, log: Path, limit: float | None, memory: int | None = None) -> None:
        self.task, self.log, self.limit = task, log, limit
        self.began: float | None = None
        log.parent.mkdir(parents=True, exist_ok=True)
        context = _context()
        self.receiver, sender = context.Pipe(duplex=False)
        self.process = context.Process(target=_work, args=(task, sender, log, memory))
        self.process.start()
        sender.close()

    def result(self) -> dict[str, Any] | None:
        """Scores and times, or a `failure` in words; None while it is running."""
        if self.receiver.poll() or not self.process.is_alive():
            found = self._received()
            if found == BEGUN:
                self.began = time.monotonic()
                return None
        elif self._is_late():
            found = {"failure": f"stopped after {self.limit:g} s", "time_limit": self.limit}
        else:
            return None
        self.stop(patience=0.0 if "time_limit" in found else 5.0)
        if "failure" not in found:
            remove(self.log)
        return found

    def _is_late(self) -> bool:
        return self.limit is not None and self.began is not None and time.monotonic() - self.began > self.limit

    def stop(self, patience: float = 0.0) -> None:
        """End the process, whatever it is doing, once it had so many seconds to end by itself."""
        self.process.join(patience)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.receiver.close()

    def _received(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = self.receiver.recv()
            return found
        except EOFError:
            self.process.join()
        code = self.process.exitcode or 0
        if code == -signal.SIGKILL:
            return {"failure": "its process was killed, perhaps for want of memory"}
        return {"failure": f"its process ended with {signal.Signals(-code).name if code < 0 else f'status {code}'}"}


def first_of(workers: list[Worker], seconds: float) -> None:
    """Wait until something comes of one of them, but no longer."""
    wait([worker.receiver for worker in workers], seconds)


def preload(paths: Iterable[str]) -> None:
    """Have these classes' modules imported once, and not by every process; to be called before the first worker."""
    modules = dict.fromkeys(path.rpartition(".")[0] for path in paths)
    multiprocessing.set_forkserver_preload(["__main__", __name__, "sklearn.base", *modules])


def _context() -> Any:
    return multiprocessing.get_context("forkserver" if _FORKS else "spawn")


def _work(task: Task, sender: Connection, log: Path, memory: int | None) -> None:
    """The process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told, and decides
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()
    printed = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(printed, stream)
    os.close(printed)
    sender.send(BEGUN)
    try:
        _hold_to(memory)
        sender.send(measured(task))
    except Exception as error:
        traceback.print_exc()
        said = without_paths(str(error))
        sender.send({"failure": f"{type(error).__name__}{': ' if said else ''}{said}"})


def _hold_to(memory: int | None) -> None:
    """Asking for more is a `MemoryError` from here on."""
    if memory is not None:
        resource = import_module("resource")
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))


def _end_with(parent: Any) -> None:
    """A killed parent has nobody to tell; what it began ends, too."""
    wait([parent.sentinel])
    os._exit(1)
