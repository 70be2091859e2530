"""The command line: parse, call, print."""

# in the order in which the help lists commands
from . import bench_kernels, bench_training, bench_regression, certify, train, train_text, generate, predict  # isort: skip
from . import benchmark_series, reproduce, sweep, efficiency, build, data  # isort: skip
from .main import app

__all__ = [
    "app", "bench_kernels", "bench_regression", "bench_training", "benchmark_series", "build", "certify", "data",
    "efficiency", "generate", "predict", "reproduce", "sweep", "train", "train_text",
]  # fmt: skip
