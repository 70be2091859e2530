"""The pages of the machine room: each folder of `kernels/` has one, and the files and tests that it names are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "src" / "primaldual" / "kernels"
FOLDERS = sorted(file.parent for file in KERNELS.glob("*/__init__.py"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_page_explains_each_folder_and_names_files_that_exist(folder: Path) -> None:
    page = (folder / "README.md").read_text("utf-8")
    named = set(re.findall(r"`([\w/]+\.(?:py|cpp|md))`", page))
    tests = ROOT / "tests"
    places = folder, KERNELS, KERNELS.parent, ROOT, tests / "ops", tests / "nn", tests / "training"
    assert not [name for name in named if not any((place / name).is_file() for place in places)]
    assert [name for name in named if Path(name).name.startswith("test_")], "which tests hold it"
