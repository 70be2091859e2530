"""What is remembered between calls: for good what a captured graph reads, and of all else no more than a number."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from primaldual import attention, mechanism
from primaldual.dual import GroupHeadsByScale
from primaldual.kernels import kept, launching
from primaldual.kernels.flex import attention as flex
from primaldual.kernels.flex.attention import Span
from primaldual.kernels.kept import Kept, OnDevice
from primaldual.kernels.projection import grouped, recentred
from primaldual.kernels.ragged import layout as layouts
from primaldual.kernels.ragged import marks, padded, passes, work
from primaldual.ops import pooling, ragged
from primaldual.primal import Sparse
from primaldual.primal.patterns import Window
from primaldual.training.capture import step_graph
from support.graphs import capture

CPU = torch.device("cpu")
SPARSE = Sparse(Window(3))


def _groups(tokens: int) -> grouped.Groups:
    return grouped.Groups(GroupHeadsByScale.groups((1, 2)), 1, tokens, 2, 8)


TABLES: dict[str, tuple[OnDevice[Any], Callable[[int], tuple[Any, ...]]]] = {
    "work": (
        work.work,
        lambda n: (layouts.pooled((1, 2), 1, n, 8, 8), 1, n, 8, torch.float32, False, CPU),
    ),
    "windows": (padded._windows, lambda n: ((1, 2), n, CPU)),
    "points per head": (passes._points_per_head, lambda n: (layouts.pooled((1, 2), 1, n, 8, 8), CPU)),
    "marks": (marks._kept_marks, lambda n: (SPARSE, (1, 2), n, n, CPU)),
    "projections": (grouped._tables, lambda n: (_groups(n), CPU)),
    "one group": (recentred._one_group, lambda n: (2, n, CPU)),
    "constant": (ragged._kept_constant, lambda n: (0.5, n, CPU)),
    "visible": (pooling._kept_visible, lambda n: (SPARSE, 1, n, n, CPU)),
    "block masks": (flex._remembered, lambda n: (Span(1, 1, 0, 9), n, n, CPU)),
}


@contextmanager
def room(function: OnDevice[Any], most: int) -> Iterator[None]:
    """Inside, so much is remembered; nothing at first, and nothing afterwards."""
    before, function.kept.most = function.kept.most, most
    function.kept.clear()
    yield
    function.kept.most = before
    function.kept.clear()


@pytest.fixture(params=TABLES)
def table(request: pytest.FixtureRequest) -> Any:
    """A function that remembers, empty and with little room, and its arguments for the nth shape."""
    function, arguments = TABLES[request.param]
    with room(function, 20):
        yield function, arguments


def test_what_a_graph_reads_is_there_after_200_other_shapes(table: Any) -> None:
    function, arguments = table
    function(*arguments(50))  # the warm-up
    with capture():
        read = function(*arguments(50))
    for n in range(100, 300):
        function(*arguments(n))
    assert function(*arguments(50)) is read
    assert len(function.kept) <= 21


def test_what_no_graph_reads_is_let_go(table: Any) -> None:
    function, arguments = table
    first = function(*arguments(50))
    assert function(*arguments(50)) is first
    for n in range(100, 300):
        function(*arguments(n))
        assert len(function.kept) <= 20
    assert arguments(50) not in function.kept
    assert function(*arguments(299)) is function.kept[arguments(299)]


@pytest.mark.parametrize("name", ["work", "windows", "marks", "points per head", "projections", "one group"])
def test_tables_of_the_host_are_refused_to_a_graph_that_never_ran_before(name: str) -> None:
    function, arguments = TABLES[name]
    with capture(), pytest.raises(RuntimeError, match="must run once, on a side stream"):
        function(*arguments(331))
    assert arguments(331) not in function.kept


@pytest.mark.parametrize("name", ["constant", "visible", "block masks"])
def test_what_a_graph_makes_lies_in_its_own_memory_and_is_not_kept(name: str) -> None:
    function, arguments = TABLES[name]
    with capture():
        assert function(*arguments(331)) is not None
    assert arguments(331) not in function.kept


def test_what_is_asked_before_a_table_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """No graph captures the default stream or a CPU; only on other streams the driver is asked."""
    asked: list[int] = []

    def found(stream: int, *device: Any) -> bool:
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: stream, raising=False)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: asked.append(stream) or stream == 7)
        return kept.capturing(torch.device(*device))

    monkeypatch.setattr(kept, "_gpus", lambda: 1)
    assert [found(stream, "cuda", 0) for stream in (0, 5, 7)] == [False, False, True]
    assert not found(7, "cpu") and not found(7, "cpu", 0)
    assert asked == [5, 7]


def test_tables_first_met_in_inference_serve_training() -> None:
    function = kept.on_device(most=4)(lambda device: torch.ones(2, device=device))
    with torch.inference_mode():
        assert not function(CPU).is_inference()


def test_the_device_is_waited_for_before_its_tables_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, waited, entries = torch.device("cuda", 1), [], Kept[torch.Tensor](4)
    tensors = [torch.ones(1) for _ in range(4)]
    alive = [weakref.ref(x) for x in tensors]
    for n, x in enumerate(tensors):
        entries.add((n, gpu), x, captured=False)
    del tensors, x
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda device: waited.append((device, [r() is not None for r in alive]))
    )
    entries.add((4, gpu), torch.ones(1), captured=False)
    assert waited == [(gpu, [True] * 4)]
    assert [r() is not None for r in alive] == [False, False, True, True]


class Compiled:
    """Stands in for a Triton kernel, before and after it is compiled."""

    def __init__(self) -> None:
        self.streams: list[int | None] = []

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def run(*arguments: Any, stream: int | None = None, **options: Any) -> "Compiled":
            self.streams.append(stream)
            return self

        return run


def test_a_launch_that_a_graph_holds_keeps_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_ready", Kept(20))
    kernel, x = Compiled(), torch.ones(1)
    addresses = []

    def launch(shape: int) -> None:
        def prepare() -> Any:
            table = torch.full((3,), shape)
            addresses.append(weakref.ref(table))
            return kernel, (1, 1, 1), (table,), {}

        launching.launch(("kernel", shape, x.device), (x,), prepare, early=False)

    launch(0)
    with capture():
        launch(0)
        launch(1)  # compiled in the capture
    for n in range(2, 202):
        launch(n)
        launch(n)
    gc.collect()
    assert [n for n, table in enumerate(addresses) if table() is not None][:2] == [0, 1]
    assert sum(table() is not None for table in addresses) == len(launching._ready) <= 22
    assert kernel.streams[:3] == [None, 1, None]  # torch's stream is handed on to a kernel that is ready


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sh", "bn+sh", "bn"])
def test_a_graph_replays_the_same_after_200_other_shapes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_ready", Kept(20))
    q, k, v = (torch.randn(2, 8, 300, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def step(*of: torch.Tensor) -> list[torch.Tensor]:
        out = attention(*of, mechanism(name), impl="ragged")
        return [out, *torch.autograd.grad(out.sum(), of)]

    expected = [x.detach().clone() for x in step(q, k, v)]
    with room(work.work, 20), room(ragged._kept_constant, 20):
        graph, results = step_graph(lambda: step(q, k, v))
        for length in range(20, 220):
            step(*(x[:, :, :length].detach().requires_grad_() for x in (q, k, v)))
        assert len(work.work.kept) <= 20 + len(work.work.kept.pinned)
        over = [torch.full((1 << n,), -1, dtype=torch.int32, device="cuda") for n in range(4, 22)]  # what was freed
        for x in results:
            x.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert over
        for mine, other in zip(results, expected, strict=True):
            assert torch.equal(mine, other)


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_every_launch_and_table_of_a_captured_step_is_kept_for_good() -> None:
    """Kernels as they are compiled for Hopper, run on a CPU."""
    from support.hopper import hopper

    ragged._kept_constant.kept.clear()
    q, k, v = (torch.randn(1, 2, 20, 16, dtype=torch.bfloat16) for _ in range(3))

    def step() -> torch.Tensor:
        return attention(q, k, v, mechanism("bn+sh", scales=(1, 2)), impl="ragged")

    with hopper() as driver:
        step()
        launched = list(driver.launched)
        assert not launching._ready.pinned
        with capture():
            step()
        assert driver.launched == 2 * launched
        assert sorted(str(key[0]) for key in launching._ready.pinned) == sorted(launched)
    assert len(ragged._kept_constant.kept.pinned) == 1
    ragged._kept_constant.kept.clear()
