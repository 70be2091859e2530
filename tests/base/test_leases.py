"""One process at a time does a piece of work, and one that was killed keeps nobody waiting."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from primaldual.base.leases import BusyError, holding

SOURCE = Path(__file__).parents[2] / "src"
HOLD = "import sys, time, pathlib; from primaldual.base.leases import holding\n"
HOLD += "with holding([pathlib.Path(sys.argv[1])]): print('held', flush=True); time.sleep(60)"


def test_what_is_held_is_busy_until_its_holder_is_gone(tmp_path):
    path = tmp_path / "a" / "one.lock"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(SOURCE)}
    )
    assert process.stdout is not None and process.stdout.readline() == b"held\n"
    with pytest.raises(BusyError, match=rf"process {process.pid} holds .*one\.lock"), holding([path]):
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert path.exists()
    two = holding([path, tmp_path / "other.lock"])
    with two, pytest.raises(BusyError, match=f"process {os.getpid()}"), holding([path]):
        pass
    assert [p.name for p in tmp_path.rglob("*")] == ["a"]


def test_where_one_is_busy_none_is_held(tmp_path):
    one, two = tmp_path / "1", tmp_path / "2"
    with holding([two]):
        with pytest.raises(BusyError), holding([one, two]):
            pass
        with holding([one]):
            pass
