"""The command line while it is still being imported: torch takes seconds, and to stop it then takes one word."""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing import parent_process
from pathlib import Path
from types import FrameType


def importing() -> None:
    """Where this process is the command, an interrupt ends it at once: there is nothing yet that could be lost.

    An exception in the middle of an import would be a traceback, or be taken for something else.
    """
    name = Path(sys.argv[0] if sys.argv else "").stem
    if name in ("primaldual", "-m") and parent_process() is None:  # "-m" while `python -m` looks for it
        _on_interrupt(_stop)


def imported() -> None:
    """From now on an interrupt is an exception, as everywhere."""
    if signal.getsignal(signal.SIGINT) is _stop:
        _on_interrupt(signal.default_int_handler)


def _on_interrupt(handler: signal._HANDLER) -> None:
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _stop):  # none of the caller's own
        try:
            signal.signal(signal.SIGINT, handler)
        except ValueError:  # only the main thread may
            return


def _stop(number: int, frame: FrameType | None) -> None:
    os.write(2, b"stopped\n")
    os._exit(128 + number)
