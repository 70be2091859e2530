"""The compiled part without a GPU: it is built once, and launches through a stand-in for CUDA's driver.

The stand-in is a small library that calls back into Python, loaded before the real one would be; so this runs in child
processes. In one the launches are run by Triton's interpreter, and must give the bits of the Python path. In the other
the kernels are compiled for Hopper, and what reaches the driver must be what Triton's own launcher hands it.
"""

import ctypes
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from primaldual import MultiheadAttention, mechanism
from primaldual.cli import app
from primaldual.dual import GroupHeadsByScale, beta_of
from primaldual.kernels import launching
from primaldual.kernels.cudnn import attention as cudnn_attention
from primaldual.kernels.cudnn import beside as parallel
from primaldual.kernels.kept import Kept
from primaldual.kernels.native import layers as compiled
from primaldual.kernels.native import library as native
from primaldual.kernels.native import packing, replay
from primaldual.kernels.projection import grouped, recentred, unpooled
from primaldual.kernels.projection import launching as nn_launching
from primaldual.kernels.ragged import layout as layouts
from primaldual.kernels.ragged import tokens as ragged_tokens
from primaldual.kernels.ragged import work as ragged_work
from support.ragged import adding_up, sweeping

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

CHILD = os.environ.get("PRIMALDUAL_TEST_NATIVE")
FOLDER = Path(os.environ.get("PRIMALDUAL_TEST_FOLDER", ""))
in_the_interpreter = pytest.mark.skipif(CHILD != "interpreter", reason="runs in a child process")
for_hopper = pytest.mark.skipif(CHILD != "hopper", reason="runs in a child process")
pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array:DeprecationWarning", "ignore:.*encountered in:RuntimeWarning"
)
DRIVER = """
typedef int (*Callback)(const void*, unsigned long long, void**);
static Callback callback;
void listen(Callback f) { callback = f; }
int cuLaunchKernelEx(const void* config, void* f, void** p, void** e) { return callback(config, (unsigned long long)f, p); }
int cuCtxGetCurrent(void** context) { *context = (void*)1; return 0; }
int cuCtxSetCurrent(void* context) { return 0; }
int cuDeviceGet(int* device, int n) { *device = n; return 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) { return 0; }
static int capturing;
void capture(int now) { capturing = now; }
int cuStreamIsCapturing(void* stream, int* status) { *status = capturing; return 0; }
int cuGetErrorString(int code, const char** said) { *said = "as the test said"; return 0; }
int cuPointerGetAttribute(void* to, int what, unsigned long long pointer) { *(unsigned long long*)to = pointer; return 0; }
int cuFuncSetAttribute(void* f, int what, int value) { return 0; }
"""  # noqa: E501
LAYER_KERNELS = {"recentre", "columns", "pool", "shift", "finish", "spread", "biases", "unpool", "total", "assemble"}
KERNELS = {"sum_rows", "pool", "forward", "delta", "backward", "finish_dq", "place", "dot_sums"}
LATER = partial(pytest.param, marks=pytest.mark.deep)  # at more sizes, and in more combinations
SCALES = {"softmax": (1, 1), "sh": (1, 2), "bn": (1, 1), "bn+sh": (4, 1), "causal": (1, 1), "dropout": (2, 1)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the compiled part and the stand-in driver."""
    if CHILD:
        return FOLDER
    if reason := native.refusal():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("native")
    native.build(folder / "native.so")
    (folder / "driver.c").write_text(DRIVER)
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1", "driver.c"]
    subprocess.run(command, cwd=folder, check=True)
    return folder


@pytest.mark.skipif(CHILD is not None, reason="this is a child process")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the real driver is there: see test_native_gpu")
@pytest.mark.parametrize(
    ("kind", "those"),
    [("hopper", "not deep"), pytest.param("interpreter", "not deep", marks=pytest.mark.deep),
     pytest.param("interpreter", "deep", marks=pytest.mark.deep)],
)  # fmt: skip
def test_with_a_stand_in_for_the_driver(kind: str, those: str, folder: Path) -> None:
    env = os.environ | {"PRIMALDUAL_TEST_NATIVE": kind, "PRIMALDUAL_TEST_FOLDER": str(folder)}
    env |= {"TRITON_INTERPRET": "1"} if kind == "interpreter" else {"TRITON_LIBCUDA_PATH": str(folder)}
    command = [sys.executable, "-m", "pytest", __file__, "-q", "-x", "-p", "no:cacheprovider", "-m", those]
    child = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stdout + child.stderr


def test_without_a_build_nothing_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIMALDUAL_CACHE", str(tmp_path))
    native.library.cache_clear()
    assert native.library() is None
    assert tmp_path in native.place().parents
    native.library.cache_clear()


def test_a_damaged_build_is_not_used_and_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setenv("PRIMALDUAL_CACHE", str(tmp_path))
    native.place().parent.mkdir(parents=True)
    native.place().write_bytes(b"not a library")
    for interpreted in (True, False):  # the interpreter's kernels cannot be launched: it is not even looked at
        monkeypatch.setattr(native, "interpreted", lambda now=interpreted: now)
        native.library.cache_clear()
        assert native.library() is None
        assert ("primaldual build --rebuild" in caplog.text) != interpreted
    native.library.cache_clear()


def test_either_setting_of_the_precision_is_read() -> None:
    q: Any = SimpleNamespace(dtype=torch.float32, device=torch.device("cuda"))
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    try:
        for rounded in (True, False):
            matmul.allow_tf32 = rounded
            assert launching.precision(q) == ("tf32" if rounded else "ieee")
        matmul.fp32_precision = "tf32"
        assert launching.precision(q) == "tf32"
    finally:
        matmul.allow_tf32 = before


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "c++")
    with pytest.raises(native.BuildError, match=r"c\+\+ and ninja not found"):
        native.build()
    result = CliRunner().invoke(app, ["build", "--rebuild"])
    assert result.exit_code == 1
    assert "install a C++ compiler and ninja" in result.stderr


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(ctypes.c_uint)), ("count", ctypes.c_uint),
    )  # fmt: skip


Launched = Callable[[Config, int, Any], None]


@pytest.fixture(scope="module")
def driver(folder: Path) -> Iterator[Callable[[Launched], None]]:
    """Says who is told of every launch."""
    library = ctypes.CDLL(str(folder / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
    listeners: list[Launched] = []
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Config), ctypes.c_ulonglong, ctypes.POINTER(ctypes.c_void_p))

    @kind
    def callback(config: Any, function: int, parameters: Any) -> int:
        try:
            listeners[-1](config[0], function, parameters)
        except Exception:
            traceback.print_exc()
            return 1
        return 0

    library.listen(callback)
    yield listeners.append


@pytest.fixture(scope="module")
def library(folder: Path, driver: object) -> Any:
    return native.load(folder / "native.so")


def read(address: int, kind: str) -> bytes:
    return ctypes.string_at(address, struct_size(kind))


def struct_size(kind: str) -> int:
    return 8 if kind.startswith("*") else packing.struct.calcsize(packing.FORMATS[kind])


def draw(name: str, length: int = 37, dim: int = 16, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """Arguments of `attend_tokens`: heads side by side in memory, as a projection gives them."""
    packed = torch.randn(2, length, 3, len(SCALES[name]), dim).to(dtype)
    q, k, v = (x.detach().requires_grad_() for x in packed.permute(2, 0, 3, 1, 4))
    beta = torch.rand(len(SCALES[name]), requires_grad=True) if name.startswith("bn") else None
    p = 0.3 if name == "dropout" else 0.0
    return q, k, v, beta, SCALES[name], name == "causal", p, torch.tensor([7], dtype=torch.int32) if p else None


class Interpreted:
    """A kernel that is noted down as if it were compiled, and run by the interpreter when it is launched."""

    compiled: dict[int, tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = {}  # noqa: RUF012
    handles = count(1)

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.fn, self.__name__ = kernel, kernel.fn, kernel.__name__

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.kernel[grid]

    def warmup(self, *arguments: Any, grid: tuple[int, ...], **options: Any) -> Any:
        constant = {name for name, kind in self.kernel.fn.__annotations__.items() if "constexpr" in str(kind)}
        kinds = {
            name: "constexpr" if x is None or name in constant else "*x" if isinstance(x, torch.Tensor)
            else "fp32" if isinstance(x, float) else "i64"
            for name, x in zip(self.kernel.arg_names, arguments, strict=True)
        }  # fmt: skip
        handle = next(self.handles)
        self.compiled[handle] = self.kernel, arguments, (*kinds.values(),)
        bits = [32 if kind == "fp32" else 64 for kind in kinds.values() if kind != "constexpr"]
        ptx = f".entry kernel({', '.join(f'.param .b{n} x' for n in [*bits, 64, 64])})"
        metadata = SimpleNamespace(num_warps=options["num_warps"], shared=0, target=SimpleNamespace(warp_size=32))
        return Compiled(self.kernel, SimpleNamespace(signature=kinds), metadata, handle, {"ptx": ptx})

    @classmethod
    def launched(cls, config: Config, function: int, parameters: Any) -> None:
        kernel, arguments, kinds = cls.compiled[function]
        given = iter(parameters[i] for i in range(len(kinds)))
        now = []
        for kind, argument in zip(kinds, arguments, strict=True):
            if kind == "constexpr":
                now.append(argument)
            elif kind == "*x":
                (address,) = packing.struct.unpack("<Q", read(next(given), kind))
                now.append(at(address, argument.dtype))
            else:
                (value,) = packing.struct.unpack(f"<{packing.FORMATS[kind]}", read(next(given), kind))
                now.append(value)
        kernel[tuple(config.grid)](*now)


@dataclass
class Compiled:
    """What Triton gives back for a compiled kernel."""

    kernel: Any
    src: Any
    metadata: Any
    function: int
    asm: dict[str, str]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.kernel[grid]


def at(address: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of one element at an address; the interpreter looks at nothing else."""
    assert address % 16 == 0
    data = (ctypes.c_char * dtype.itemsize).from_address(address)
    return torch.frombuffer(data, dtype=dtype)


@pytest.fixture
def interpreter(library: Any, driver: Callable[[Launched], None], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The compiled part, whose launches the interpreter runs."""
    real = ragged_work.kernels()
    found = SimpleNamespace(**{name: Interpreted(getattr(real, name)) for name in KERNELS})
    monkeypatch.setattr(ragged_work, "kernels", lambda: found)
    layers = nn_launching.kernels()
    of_layers = SimpleNamespace(**{name: Interpreted(getattr(layers, name)) for name in LAYER_KERNELS})
    for module in (grouped, recentred, unpooled):
        monkeypatch.setattr(module, "kernels", lambda: of_layers)
    monkeypatch.setattr(launching, "_ready", Kept(1024))
    driver(Interpreted.launched)
    return library


def step(attend: Callable[..., Any], arguments: tuple[Any, ...], up: torch.Tensor) -> list[torch.Tensor]:
    out = attend(*arguments)
    leaves = [x for x in arguments[:4] if x is not None]
    return [out, *torch.autograd.grad(out, leaves, up)]


def both(library: Any, arguments: tuple[Any, ...], up: torch.Tensor) -> None:
    """The same bits and strides from the compiled part and from Python, in buffers of the same size."""
    mine = step(lambda *x: ragged_tokens.attend_compiled(library, *x), arguments, up)
    other = step(ragged_tokens._Tokens.apply, arguments, up)
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(mine, other, strict=True))
    assert [x.untyped_storage().nbytes() for x in mine] == [x.untyped_storage().nbytes() for x in other]
    with torch.no_grad():
        out = ragged_tokens.attend_compiled(library, *arguments)
    assert torch.equal(out, other[0])
    assert out.grad_fn is None


@in_the_interpreter
@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("length", [1, 67, LATER(68)])  # windows that are not whole, and whole ones
def test_the_bits_of_the_python_path(name: str, length: int, interpreter: Any) -> None:
    arguments = draw(name, length)
    both(interpreter, arguments, torch.randn(arguments[0].shape))


@in_the_interpreter
def test_gradients_that_lie_otherwise(interpreter: Any) -> None:
    arguments = draw("sh", 5)
    shape = arguments[0].shape
    for up in (
        torch.randn(()).expand(shape),
        torch.randn(2, 5, 2, 16).transpose(1, 2),
        torch.randn(shape).mT.clone().mT,
    ):
        both(interpreter, arguments, up)


@in_the_interpreter
def test_whole_heads_in_one_sweep(interpreter: Any) -> None:
    arguments = draw("dropout", 150, dtype=torch.float16)
    with sweeping():
        both(interpreter, arguments, torch.randn(arguments[0].shape).half())
        assert any(key[:2] == ("backward", 8) for key in launching._ready)


@in_the_interpreter
@pytest.mark.parametrize("name", [LATER("sh"), "bn+sh", LATER("dropout")])
def test_blocks_that_add_to_dq(name: str, interpreter: Any) -> None:
    arguments = draw(name, 152, dtype=torch.float16)
    up = torch.randn(arguments[0].shape).half()
    with adding_up(32, 32, 4, 2, 0) as launched:
        both(interpreter, arguments, up)
        assert launched.count("finish_dq") == 3  # noted down twice, and by Python
        torch.use_deterministic_algorithms(True)
        try:
            both(interpreter, arguments, up)
        finally:
            torch.use_deterministic_algorithms(False)
        assert launched.count("finish_dq") == 3


@in_the_interpreter
def test_gradients_of_some_inputs(interpreter: Any) -> None:
    arguments = draw("bn+sh")
    q, k, v, beta = arguments[:4]
    up = torch.randn(q.shape)
    expected = dict(zip("okqvb", step(ragged_tokens._Tokens.apply, (q, k, v, *arguments[3:]), up), strict=True))
    for wanted in ((q,), (k, v), (beta,), (v,)):
        for x in (q, k, v, beta):
            x.requires_grad_(any(x is y for y in wanted))
        out = ragged_tokens.attend_compiled(interpreter, *arguments)
        found = torch.autograd.grad(out, wanted, up)
        names = {id(q): "k", id(k): "q", id(v): "v", id(beta): "b"}
        assert all(torch.equal(g, expected[names[id(x)]]) for g, x in zip(found, wanted, strict=True))


@in_the_interpreter
def test_what_was_saved_must_not_be_written_to(interpreter: Any) -> None:
    for changed in (0, "out"):
        arguments = draw("sh", length=100)  # with fewer keys the output is not needed on the way back
        q = arguments[0].clone()
        out = ragged_tokens.attend_compiled(interpreter, q, *arguments[1:])
        with torch.no_grad():
            (out if changed == "out" else q).zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out.sum(), arguments[0])


@in_the_interpreter
def test_differentiated_once(interpreter: Any) -> None:
    arguments = draw("sh")
    out = ragged_tokens.attend_compiled(interpreter, *arguments)
    with pytest.raises(RuntimeError, match="differentiated only once"):
        torch.autograd.grad(out.square().sum(), arguments[0], create_graph=True)


@in_the_interpreter
def test_saved_once(interpreter: Any) -> None:
    arguments = draw("sh")
    out = ragged_tokens.attend_compiled(interpreter, *arguments)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.sum().backward()


@in_the_interpreter
def test_recomputed_when_checkpointed(interpreter: Any) -> None:
    arguments = draw("bn+sh")
    up = torch.randn(arguments[0].shape)

    def attend(*x: Any) -> torch.Tensor:
        return ragged_tokens.attend_compiled(interpreter, *x)

    def again(*x: Any) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(attend, *x, use_reentrant=False)

    expected = step(attend, arguments, up)
    assert all(torch.equal(a, b) for a, b in zip(expected, step(again, arguments, up), strict=True))


@in_the_interpreter
@pytest.mark.parametrize("name", ["softmax", "sh", "bn+sh"])
def test_what_was_saved_may_be_moved(name: str, interpreter: Any) -> None:
    arguments = draw(name, length=5)
    up = torch.randn(arguments[0].shape)
    expected = step(ragged_tokens._Tokens.apply, arguments, up)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: x.clone(memory_format=torch.contiguous_format), lambda x: x
    ):
        found = step(lambda *x: ragged_tokens.attend_compiled(interpreter, *x), arguments, up)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@in_the_interpreter
def test_what_was_saved_of_expanded_keys_may_be_moved(interpreter: Any) -> None:
    q, k, *others = draw("sh", length=5)
    arguments = q, k.detach()[:, :1].expand(-1, 2, -1, -1), *others
    expected = torch.autograd.grad(ragged_tokens.attend_compiled(interpreter, *arguments).sum(), q)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: x.clone(memory_format=torch.contiguous_format), lambda x: x
    ):
        found = torch.autograd.grad(ragged_tokens.attend_compiled(interpreter, *arguments).sum(), q)
    assert torch.equal(found[0], expected[0])


@in_the_interpreter
def test_another_device_stays_in_python(interpreter: Any) -> None:
    q, k, v, *others = draw("sh", length=22)
    assert ragged_tokens.attend_compiled(interpreter, q, k, v.to("meta"), *others) is None


@in_the_interpreter
def test_too_little_memory_to_learn_stays_in_python(interpreter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(ragged_tokens, "tokens_gradients", full)
    assert ragged_tokens.attend_compiled(interpreter, *draw("sh", length=23)) is None


def lengths(library: Any, *of: int) -> None:
    """Calls of other kinds."""
    for length in of:
        assert ragged_tokens.attend_compiled(library, *draw("sh", length)) is not None


@in_the_interpreter
def test_a_number_of_kinds_of_calls_is_known_and_a_node_keeps_its_own(
    interpreter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "MOST", 6)
    arguments = draw("bn+sh", 26)
    up = torch.randn(arguments[0].shape)
    leaves = [x for x in arguments[:4] if x is not None]
    expected = step(ragged_tokens._Tokens.apply, arguments, up)
    out = ragged_tokens.attend_compiled(interpreter, *arguments)
    mine = max(replay._held)
    lengths(interpreter, *range(41, 55))
    assert sum(number > mine for number in replay._held) <= 6
    assert mine in replay._held  # the node's
    for found, other in zip([out, *torch.autograd.grad(out, leaves, up)], expected, strict=True):
        assert torch.equal(found, other)
    del out, found
    lengths(interpreter, 55)
    assert mine not in replay._held
    both(interpreter, arguments, up)  # learnt again


@in_the_interpreter
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_what_a_graph_captures_is_known_for_good(
    when: str, interpreter: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "MOST", 6)
    capture = ctypes.CDLL(str(folder / "libcuda.so.1")).capture
    arguments = draw("sh", 27 if when == "forward" else 28)
    ragged_tokens.attend_compiled(interpreter, *arguments)  # the warm-up
    mine = max(replay._held)
    capture(when == "forward")
    out = ragged_tokens.attend_compiled(interpreter, *arguments)
    capture(when == "backward")
    out.sum().backward()
    capture(0)
    del out
    lengths(interpreter, *range(61, 75))
    assert mine in replay._held
    monkeypatch.setattr(replay, "_learn", None)  # it is not asked again
    assert ragged_tokens.attend_compiled(interpreter, *arguments) is not None


@in_the_interpreter
def test_what_is_refused_stays_in_python(interpreter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = draw("sh", length=20)

    def refuse(*_: Any) -> None:
        raise replay.RefusedError

    monkeypatch.setattr(replay, "pack", refuse)
    assert ragged_tokens.attend_compiled(interpreter, *arguments) is None
    monkeypatch.setattr(replay, "_learn", None)  # it is not asked again
    assert ragged_tokens.attend_compiled(interpreter, *arguments) is None
    columns = (arguments[0].detach().mT.contiguous().mT, *arguments[1:])
    assert ragged_tokens.attend_compiled(interpreter, *columns) is None
    empty = (*(x[:0] for x in arguments[:3]), *arguments[3:])
    assert ragged_tokens.attend_compiled(interpreter, *empty) is None


@in_the_interpreter
def test_an_error_of_the_driver_is_raised(interpreter: Any, driver: Callable[[Launched], None]) -> None:
    arguments = draw("sh", length=21)

    def fail(*_: Any) -> None:
        raise ValueError("no")

    driver(fail)
    with pytest.raises(RuntimeError, match="as the test said"):
        ragged_tokens.attend_compiled(interpreter, *arguments)


LAYERS = {
    "bn": mechanism("bn", beta=0.6),
    "bn, learned": mechanism("bn", learnable=True),
    "sh": mechanism("sh", scales=(1, 2)),
    "bn+sh": mechanism("bn+sh", beta=0.6, scales=(1, 4)),
    "bn+sh, learned, apart": mechanism("bn+sh", learnable=True, scales=(3, 1)),
    "all pooled": mechanism("bn+sh", scales=(2, 4)),
}


def draw_layer(name: str, length: int, **options: Any) -> tuple[MultiheadAttention, torch.Tensor]:
    layer = MultiheadAttention(32, 2, batch_first=True, dtype=torch.float16, mechanism=LAYERS[name], **options)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, mean=0.05, std=0.3)
    return layer, torch.randn(2, length, 32).half().requires_grad_()


@pytest.fixture
def layers(interpreter: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[bool, list[torch.Tensor]]]:
    """A step of a layer, with or without the compiled part: whether that was used, the output and all gradients."""

    def step(layer: MultiheadAttention, x: torch.Tensor, it: bool, way: str = "") -> tuple[bool, list[torch.Tensor]]:
        outs: list[torch.Tensor | None] = []

        def attend(*given: Any, **options: Any) -> torch.Tensor | None:
            outs.append(real(*given, **options))
            return outs[-1]

        with monkeypatch.context() as patch:
            real = compiled.attend
            patch.setattr(compiled, "attend", attend)
            patch.setattr(native, "library", lambda: interpreter if it else None)
            if way:
                patch.setattr(layer, "impl", way)
            torch.manual_seed(1)
            out = layer(x, x, x, need_weights=False)[0]
            leaves = [leaf for leaf in (x, *layer.parameters()) if leaf.requires_grad]
            found = torch.autograd.grad(out, leaves, torch.ones_like(out)) if out.requires_grad else ()
        return len(outs) == 1 and outs[0] is not None, [out, *found]

    return step


def same_bits(layers: Any, layer: MultiheadAttention, x: torch.Tensor, way: str = "") -> None:
    used, mine = layers(layer, x, True, way)
    unused, other = layers(layer, x, False, way)
    assert used
    assert not unused
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(mine, other, strict=True))


@in_the_interpreter
@pytest.mark.parametrize("way", ["unpooled", "grouped"])
@pytest.mark.parametrize("length", [5, LATER(132)])
@pytest.mark.parametrize("name", [name for name in LAYERS if not name.startswith("bn,") and name != "bn"])
def test_layers_with_scaled_heads_have_the_bits_of_the_python_path(
    name: str, length: int, way: str, layers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    if length == 132:  # all memory is allocated when it is needed
        monkeypatch.setattr(replay, "LARGE", 1)
    layer, x = draw_layer(name, length)
    same_bits(layers, layer, x, way)
    with torch.no_grad():
        same_bits(layers, layer, x, way)


@in_the_interpreter
@pytest.mark.parametrize("way", ["unpooled", "grouped"])
def test_the_way_back_can_be_taken_twice(way: str, interpreter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: interpreter)
    layer, x = draw_layer("bn+sh", 21)
    layer.impl = way
    out = layer(x, x, x, need_weights=False)[0]
    first, second = (torch.autograd.grad(out.sum(), (x, *layer.parameters()), retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))
    with torch.no_grad():
        assert torch.equal(layer(x, x, x, need_weights=False)[0], out)


@in_the_interpreter
@pytest.mark.parametrize("name", ["bn", "bn, learned"])
def test_re_centred_layers_have_the_bits_of_the_python_path(
    name: str, layers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_python(*given: Any, pool_first: bool) -> torch.Tensor:
        *projection, dropout_p, seed = given
        return ragged_tokens.attend_tokens(*unpooled.project(*projection), None, (1, 1), False, dropout_p, seed)

    layer, x = draw_layer(name, 70)
    used, mine = layers(layer, x, True, "unpooled")
    assert used
    monkeypatch.setattr(compiled, "attend", in_python)
    _, other = layers(layer, x, True, "unpooled")
    assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


@pytest.fixture(scope="module")
def cudnn() -> Iterator[list[str]]:
    """A stand-in for cuDNN's attention that C++ finds, too; the names of what was called."""
    called: list[str] = []
    library = torch.library.Library("aten", "IMPL")

    def forward(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> tuple[Any, ...]:
        called.append("forward")
        scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5
        lse, none = scores.logsumexp(-1, keepdim=True), torch.empty(0)
        out = torch.empty_like(q).copy_((scores - lse).exp() @ v.float())
        return out, lse, none, none, q.shape[2], k.shape[2], none, none, none

    def backward(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *_: Any, **__: Any) -> tuple[Any, ...]:
        called.append("backward")
        assert grad.stride() == out.stride()
        made = [torch.empty_like(x) for x in (q, k, v)]
        grad, q, k, v, out = (x.float() for x in (grad, q, k, v, out))
        scale = q.shape[-1] ** -0.5
        p = (q @ k.mT * scale - lse).exp()
        ds = p * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * scale
        found = ds @ k, ds.mT @ q, p.mT @ grad
        return tuple(x.copy_(y) for x, y in zip(made, found, strict=True))

    library.impl("_scaled_dot_product_cudnn_attention", forward, "CPU")
    library.impl("_scaled_dot_product_cudnn_attention_backward", backward, "CPU")
    yield called
    library._destroy()


@in_the_interpreter
@pytest.mark.parametrize("length", [9, LATER(130), LATER(1100)])  # gradients are added up in one launch or in two
@pytest.mark.parametrize("name", ["bn", "bn, learned"])
def test_re_centred_layers_with_cudnns_attention(
    name: str, length: int, layers: Any, cudnn: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = draw_layer(name, length)
    _, other = layers(layer, x, False)
    layer.impl = "recentred_projection"
    monkeypatch.setattr(cudnn_attention, "usable", lambda *_: True)
    cudnn.clear()
    _, mine = layers(layer, x, True)
    assert cudnn == ["forward", "backward"]
    for a, b in zip(mine, other, strict=True):
        size = float(b.detach().abs().max())
        torch.testing.assert_close(a, b, rtol=8 * torch.finfo(a.dtype).eps, atol=8 * torch.finfo(a.dtype).eps * size)
    with torch.no_grad():
        _, (inferred,) = layers(layer, x, True)
    assert torch.equal(inferred, mine[0])
    x.requires_grad_(False)
    assert all(torch.equal(a, b) for a, b in zip(layers(layer, x, True)[1][1:], mine[2:], strict=True))


@in_the_interpreter
@pytest.mark.parametrize("way", ["unpooled", "grouped"])
def test_layers_without_bias_with_dropout_and_some_frozen_parameters(way: str, layers: Any) -> None:
    layer, x = draw_layer("bn+sh, learned, apart", 20, bias=False, dropout=0.3)
    same_bits(layers, layer, x, way)
    layer, x = draw_layer("bn+sh, learned, apart", 20)
    for frozen in ([x], [layer.in_proj_weight], [layer.in_proj_bias, layer.learned["beta"]]):
        for leaf in (x, *layer.parameters()):
            leaf.requires_grad_(all(leaf is not other for other in frozen))
        same_bits(layers, layer, x, way)


@in_the_interpreter
@pytest.mark.parametrize("way", ["unpooled", LATER("grouped")])
def test_inputs_of_layers_that_lie_otherwise(way: str, layers: Any) -> None:
    layer, x = draw_layer("bn+sh", 20)
    for lies in (x[:, ::2], x.detach()[:1].expand(3, -1, -1), x.detach().mT.contiguous().mT.requires_grad_()):
        same_bits(layers, layer, lies.detach().requires_grad_(lies.requires_grad), way)
    layer.batch_first = False
    same_bits(layers, layer, x, way)
    layer, x = draw_layer("bn", 20, bias=False)
    layer.batch_first = False
    assert layers(layer, x, True, "unpooled")[0]


@in_the_interpreter
@pytest.mark.parametrize("way", ["unpooled", "grouped"])
def test_parameters_that_lie_otherwise(way: str, layers: Any) -> None:
    layer, x = draw_layer("bn+sh, learned, apart", 20)
    layer.learned["beta"].data.fill_(0.7)
    _, expected = layers(layer, x, True, way)
    layer.in_proj_bias.data = torch.stack([layer.in_proj_bias.data, torch.ones(96).half()], 1)[:, 0]
    layer.learned["beta"].data = torch.tensor([0.7, 9.0]).half()[:1].expand(2)
    for it in (True, False):
        _, found = layers(layer, x, it, way)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@in_the_interpreter
@pytest.mark.parametrize("way", ["unpooled", "grouped"])
def test_a_layer_that_trains_on_equals_python(way: str, layers: Any) -> None:
    """Buffers are given back and taken again; parameters change in place."""
    ends = []
    for it in (True, False):
        torch.manual_seed(0)
        layer, x = draw_layer("bn+sh, learned, apart", 40)
        for _ in range(3):
            _, (_, _, *gradients) = layers(layer, x, it, way)
            with torch.no_grad():
                for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
                    parameter -= 0.01 * gradient
        ends.append([parameter.detach().clone() for parameter in layer.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@in_the_interpreter
def test_what_is_neither_a_launch_nor_a_product_is_refused(layers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = unpooled.forward

    def doubled(*given: Any) -> tuple[Any, ...]:  # queries that only a kernel reads
        q, *others = real(*given)
        return q + q, *others

    for length, forward in ((24, lambda x, *others: real(x + x, *others)), (25, doubled)):
        layer, x = draw_layer("sh", length)
        monkeypatch.setattr(unpooled, "forward", forward)
        used, _ = layers(layer, x, True, "unpooled")
        assert not used


class Hopper:
    """A driver of Triton's for a device that is not there. Its launches reach the stand-in by Triton's own launcher."""

    def __init__(self, launcher: Any, target: Any) -> None:
        self.kinds: dict[int, list[str]] = {}
        self.target = target
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (1, self._handle(), 0, 0, 1024),
            get_device_properties=lambda _: {"max_shared_mem": 232448},
        )
        self.launcher, self.latest = launcher, None

    def launcher_cls(self, src: Any, metadata: Any) -> Any:
        self.latest = [kind for kind in src.signature.values() if kind != "constexpr"]
        return self.launcher(src, metadata)

    def _handle(self) -> int:
        self.kinds[handle := len(self.kinds) + 1] = [*self.latest, "*scratch", "*scratch"]
        return handle

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target


def listening(
    driver: Callable[[Launched], None], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[tuple[Any, ...]], set[int]]:
    """What reaches the driver, in order; of pointers only those that are given, 0 and whether they are there."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.runtime import driver as active

    hopper = Hopper(CudaLauncher, GPUTarget("cuda", 90, 32))
    active.set_active(hopper)
    for kernel in KERNELS:  # compiled for this driver
        getattr(ragged_work.kernels(), kernel).device_caches.clear()
    for kernel in LAYER_KERNELS:
        getattr(nn_launching.kernels(), kernel).device_caches.clear()
    monkeypatch.setattr(launching, "_ready", Kept(1024))
    monkeypatch.setattr(launching, "starts_early", lambda device: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    seen: list[tuple[Any, ...]] = []
    given: set[int] = set()

    def launched(config: Config, function: int, parameters: Any) -> None:
        kinds = hopper.kinds[function]
        values = [read(parameters[i], kind) for i, kind in enumerate(kinds)]
        pointers = [int.from_bytes(x, "little") for x, kind in zip(values, kinds, strict=True) if kind[0] == "*"]
        numbers = [x for x, kind in zip(values, kinds, strict=True) if kind[0] != "*"]
        assert all(x % 16 == 0 for x in pointers)
        there = [x if x == 0 or x in given else 1 for x in pointers]
        attributes = [config.attributes[0]] if config.count else []
        shape = *config.grid, *config.block, config.shared, config.stream
        seen.append((function, shape, attributes, numbers, there))

    driver(launched)
    return seen, given


@for_hopper
@pytest.mark.parametrize(
    ("name", "together", "launches"),
    [("sh", (), 4), ("sh", (64, 128, 8, 2, 0), 5), ("bn+sh", (), 8), ("bn+sh", (32, 64, 4, 2, 168), 9),
     ("bn", (), 7), ("causal", (), 3), ("dropout", (), 4), ("dropout", (64, 64, 4, 2, 0), 5)],
)  # fmt: skip
def test_what_triton_hands_the_driver(
    name: str, together: tuple[int, ...], launches: int, library: Any, driver: Callable[[Launched], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    seen, given = listening(driver, monkeypatch)
    length = 152 if together else 150
    q, k, v, beta, *others, seed = draw(name, length, dim=64, dtype=torch.bfloat16)
    up = torch.randn(2, length, 2, 64, dtype=q.dtype).transpose(1, 2)
    steps = []
    with adding_up(*together):
        work = ragged_work.work(*_layout(name, q, k, v))
        tables = work.table, work.forward, work.back.tasks
        given |= {x.data_ptr() for x in (q, k, v, up, seed, *tables) if x is not None}
        for attend in (lambda *x: ragged_tokens.attend_compiled(library, *x), ragged_tokens._Tokens.apply):
            seen.clear()
            step(attend, (q, k, v, beta, *others, seed), up)
            steps.append(list(seen))
    assert steps[0] == steps[1]
    assert len(steps[0]) == launches
    assert all(attributes == [6] for _, _, attributes, _, _ in seen)  # programmatic stream serialization


def _layout(name: str, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    B, _, L, D = q.shape
    pooled = max(SCALES[name]) > 1
    layout = layouts.pooled(SCALES[name], B, L, D, D) if pooled else layouts.of_tokens(k, v)
    return layout, B, L, D, q.dtype, name == "causal", q.device


@for_hopper
@pytest.mark.parametrize("pool_first", [False, True])
@pytest.mark.parametrize("name", ["sh", "bn+sh", "bn+sh, learned, apart"])
def test_what_triton_hands_the_driver_for_a_layer(
    name: str, pool_first: bool, library: Any, driver: Callable[[Launched], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recentred, "launches", lambda x: True)
    monkeypatch.setattr(native, "library", lambda: library)
    seen, given = listening(driver, monkeypatch)
    layer, x = draw_layer(name, 136)
    scales = layer.primal.training_set.head_scales(2)
    groups = grouped.Groups(GroupHeadsByScale.groups(scales), 2, 136, 2, 16)
    number, beta = beta_of(layer.primal.inputs[0], dict(layer.learned)) if layer.primal.inputs else (0.0, None)
    projection = x, layer.in_proj_weight, layer.in_proj_bias, groups, len(layer.primal.inputs) > 0, number, beta
    up = torch.randn(2, 136, 2, 16).half().transpose(1, 2)
    leaves = [leaf for leaf in (x, layer.in_proj_weight, layer.in_proj_bias, beta) if leaf is not None]
    given |= {leaf.data_ptr() for leaf in (*leaves, up)}

    def in_python() -> torch.Tensor:
        if not pool_first:
            return ragged_tokens.attend_tokens(*unpooled.project(*projection), None, scales, False, 0.0, None)
        packed, shift = grouped.project(*projection)
        queries = parallel.Queries(2, 2, 136, 16, groups.row)
        return parallel.attend(packed, queries, shift, grouped.layout(groups), False)

    steps = []
    for attend in (lambda: compiled.attend(*projection, 0.0, None, pool_first=pool_first), in_python):
        seen.clear()
        torch.autograd.grad(attend(), leaves, up)
        steps.append(list(seen))
    assert steps[0] == steps[1]
    assert len(steps[0]) > 5
