"""What is done before a step becomes a graph, with stand-ins for the device."""

from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from primaldual.training.capture import WARM_UP, Captured, WaitsForDeviceError, step_graph


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a device would have been told, in order."""
    said: list[str] = []

    @contextmanager
    def inside(name: str) -> Any:
        said.append(f"in {name}")
        yield
        said.append(f"out of {name}")

    def stream(name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, wait_stream=lambda other: said.append(f"{name} waits for {other.name}"))

    def graph(made: Any, pool: Any = None) -> AbstractContextManager[None]:
        return inside(f"graph of pool {pool}")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream("main"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream("side"))
    monkeypatch.setattr(torch.cuda, "stream", lambda s: inside(s.name))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(pool=lambda: 7, replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: said.append(f"waiting: {mode}"))
    return said


def test_a_step_warms_up_aside_and_is_captured_once(done: list[str]) -> None:
    graph = step_graph(lambda: done.append("step") or 5, warm_up=2)
    assert graph.result == 5
    assert done == [
        "side waits for main", "in side", "step", "step", "out of side", "main waits for side",
        "in graph of pool None", "step", "out of graph of pool None",
    ]  # fmt: skip


def test_the_last_run_before_a_capture_must_not_wait(done: list[str]) -> None:
    captured = Captured(lambda x: done.append("step") or x + 1, (torch.zeros(2),), pool=3)
    assert done[: WARM_UP + 3] == ["side waits for main", "in side", "step", "step", "waiting: error", "step"]
    assert done[-3:] == ["in graph of pool 3", "step", "out of graph of pool 3"]
    assert captured.pool == 7 and captured(torch.zeros(2)).tolist() == [1.0, 1.0]


def test_a_step_that_waits_is_not_captured_and_what_it_began_is_waited_for(done: list[str]) -> None:
    def waits() -> torch.Tensor:
        if "waiting: error" in done:
            raise RuntimeError("called a synchronizing CUDA operation\nat length")
        return torch.zeros(1)

    with pytest.raises(WaitsForDeviceError, match=r"^called a synchronizing CUDA operation$"):
        Captured(waits)
    assert done[-2:] == ["waiting: 0", "main waits for side"]
