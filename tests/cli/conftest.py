"""Where the commands find data: a cache of their own, and no data directory."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from primaldual.data import load
from training.toy import toy


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRIMALDUAL_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("PRIMALDUAL_DATA", raising=False)
        yield


@pytest.fixture
def short_series(monkeypatch) -> None:
    """Few and short ones in place of the sets that are inside aeon."""

    def load_short(name, *given, **options):
        short = name in ("JapaneseVowels", "BasicMotions")
        return replace(toy(40), name=name) if short else load(name, *given, **options)

    monkeypatch.setattr("primaldual.paper.families.load", load_short)
