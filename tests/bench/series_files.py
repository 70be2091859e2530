"""Small sets of time series, as files."""

from pathlib import Path

import numpy as np


def write_set(
    folder: Path, name: str, *, cases: int = 12, steps: int = 8, channels: int = 2, regression: bool = False,
    unequal: bool = False, missing: bool = False, test: bool = True,
) -> None:  # fmt: skip
    """Series whose mean is the target, or tells the class."""
    generator = np.random.default_rng(sum(map(ord, name)))
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("TRAIN", "TEST") if test else ("TRAIN",):
        last = "@targetLabel true" if regression else "@classLabel true a b c"
        lines = [f"@problemName {name}", f"@equalLength {str(not unequal).lower()}", last, "@data"]
        for i in range(cases):
            x = generator.normal(size=(channels, steps - (i % 3 if unequal else 0))) + 3 * (i % 3)
            text = [",".join(f"{v:.4f}" for v in row) for row in x]
            if missing and i % 4 == 0:
                text[0] = "?," + text[0].partition(",")[2]
            lines.append(":".join([*text, f"{10 * x.mean():.4f}" if regression else "abc"[i % 3]]))
        (folder / f"{name}_{part}.ts").write_text("\n".join(lines) + "\n")
