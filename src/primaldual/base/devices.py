"""Which device is meant, and whether it is here."""

from __future__ import annotations

import torch


def device_of(given: str | torch.device | None, name: str = "device") -> torch.device:
    """A device that is here; a GPU, where there is one, for None and "auto".

    Args:
        given: such as "cpu", "cuda" or "cuda:1".
        name: of the argument, as an error calls it.

    >>> device_of("cpu")
    device(type='cpu')
    """
    if given is None or given == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError, ValueError):
        raise ValueError(f"{name} takes cpu, cuda or cuda:N; got {given!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} takes cpu, cuda or cuda:N; got {given!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"{name} {given}: this machine has {torch.cuda.device_count()} CUDA devices; take cpu, or auto for a "
            f"GPU where there is one"
        )
    return device
