"""The example heals a model, and the code of the documentation runs."""

import importlib.util
import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[3]


def test_the_example_heals_what_the_conversion_costs(capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("heal_transformers", ROOT / "examples" / "heal_transformers.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    losses = example.main("gate", steps=40, heal=20)
    assert losses.healed < losses.converted
    assert losses.trained < losses.converted
    assert "2 attentions are 'gate' now; 4 parameters" in capsys.readouterr().out


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "transformers.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    exec(compile("\n".join(blocks), "transformers.md", "exec"), {"__name__": "page"})
