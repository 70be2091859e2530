"""The README's code runs as it stands."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_code_of_the_readme_runs(capsys, tmp_path, monkeypatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 5
    monkeypatch.chdir(tmp_path)  # where plots go
    exec(compile("\n".join(blocks), str(README), "exec"), {"__name__": "readme"})
    assert "The support vector expansion" in capsys.readouterr().out


def test_every_file_the_readme_points_to_exists() -> None:
    targets = re.findall(r"\]\(([^)]+)\)", README.read_text(encoding="utf-8"))
    assert len(targets) >= 4
    assert all((README.parent / target).is_file() for target in targets)
