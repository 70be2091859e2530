"""`primaldual` and `python -m primaldual`: the command line."""

import os
import signal
from types import FrameType


def main() -> None:
    """Run a command; to stop it while torch is still being imported takes one word."""
    before = signal.signal(signal.SIGINT, _stop)
    from primaldual.cli import app

    signal.signal(signal.SIGINT, before)
    app(prog_name="primaldual")


def _stop(number: int, frame: FrameType | None) -> None:
    """An exception in the middle of an import may be taken for something else."""
    os.write(2, b"stopped\n")
    os._exit(128 + number)


if __name__ == "__main__":
    main()
