"""The `.ts` format of the UEA and TSER archives, line by line.

Values and labels are those of aeon's own loader, which a test checks. What is added: an error names its line, blank
lines and comments between series are skipped, and the values of time-stamped series keep their signs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from .errors import DataFormatError

Kind = Literal["classification", "regression"]


class Doubt(NamedTuple):
    """The header and the series disagree, in a way that leaves the series readable."""

    line: int
    message: str


@dataclass(frozen=True, eq=False)
class TsFile:
    """What a file holds, as it stands there.

    Args:
        file: how errors call it.
        series: each [length, channels], float64, NaN where missing.
        labels: lower case, as both reference loaders give them; for regression the target.
        doubts: errors, unless the set is known to be right all the same.
    """

    file: str
    kind: Kind
    series: list[np.ndarray]
    labels: list[str]
    doubts: list[Doubt]

    @property
    def channels(self) -> int:
        """Of every series."""
        return int(self.series[0].shape[1])

    def refuse_doubts(self) -> None:
        """Raise the first doubt as an error."""
        for line, message in self.doubts:
            raise DataFormatError(self.file, line, message)


@dataclass
class _Header:
    """The tags before `@data`, each with its line."""

    line: int = 0
    tags: dict[str, tuple[int, list[str]]] = field(default_factory=dict)

    def flag(self, file: str, tag: str, default: bool) -> bool:
        line, values = self.tags.get(tag, (0, [str(default).lower()]))
        if not values or values[0] not in ("true", "false"):
            raise DataFormatError(file, line, f"@{tag} must be true or false, got {' '.join(values)[:40] or 'nothing'}")
        return values[0] == "true"

    def count(self, file: str, *names: str) -> tuple[int, int] | None:
        """(line, number) of the first of these tags that is there."""
        for tag in names:
            if tag in self.tags:
                line, values = self.tags[tag]
                if len(values) != 1 or not re.fullmatch("[0-9]{1,15}", values[0]):
                    raise DataFormatError(
                        file, line, f"@{tag} must be a number, got {' '.join(values)[:40] or 'nothing'}"
                    )
                return line, int(values[0])
        return None


def read_ts(lines: Iterable[str], file: str) -> TsFile:
    """Parse the lines of a file; `file` is how errors call it."""
    numbered = ((number, line.strip().lower()) for number, line in enumerate(lines, 1))
    header = _Header()
    for header.line, line in numbered:
        if line == "@data":
            break
        if not line or line[0] in "#%":
            continue
        if line[0] != "@" or not line[1:].split():
            raise DataFormatError(
                file, header.line, f"expected a tag such as @problemName, or @data; got {_short(line)}"
            )
        tag, *values = line[1:].split()
        header.tags[tag] = (header.line, values)
    else:
        raise DataFormatError(file, header.line, "the file ends before @data")

    kind, classes = _kind(header, file)
    stamped, equal = header.flag(file, "timestamps", False), header.flag(file, "equallength", True)
    dimensions = header.count(file, "dimensions", "dimension")
    length = header.count(file, "serieslength") if equal else None
    series: list[np.ndarray] = []
    labels: list[str] = []
    at: list[int] = []
    number = header.line
    for number, line in numbered:
        if not line or line[0] == "#":
            continue
        *channels, label = _stamped(line, file, number) if stamped else line.split(":")
        if not channels:
            raise DataFormatError(file, number, f"expected channels and a label with ':' between; got {_short(line)}")
        series.append(_values(channels, file, number))
        labels.append(_label(label.strip(), kind, file, number))
        at.append(number)
    if not series:
        raise DataFormatError(file, number, "there are no series after @data")

    doubts = _agree([s.shape[1] for s in series], dimensions, "channels", file, at)
    if equal:
        doubts += _agree([len(s) for s in series], length, "steps", file, at)
    if header.flag(file, "univariate", False) and series[0].shape[1] > 1:
        doubts.append(
            Doubt(header.tags["univariate"][0], f"@univariate true, but there are {series[0].shape[1]} channels")
        )
    if classes is not None:
        doubts += [
            Doubt(n, f"class {label!r} is not one of those that @classLabel names: {', '.join(classes)}{_hint(label)}")
            for n, label in zip(at, labels, strict=True)
            if label not in classes
        ]
    return TsFile(file, kind, series, labels, doubts)


def _kind(header: _Header, file: str) -> tuple[Kind, list[str] | None]:
    """What the last field of a line is, and the classes that the header names."""
    if header.flag(file, "targetlabel", False):
        return "regression", None
    line, values = header.tags.get("classlabel", (header.line, ["false"]))
    if values[:1] != ["true"]:
        raise DataFormatError(file, line, "neither @classLabel true nor @targetLabel true: there is nothing to learn")
    if len(values) == 1:
        raise DataFormatError(file, line, "@classLabel true must be followed by the classes")
    return "classification", values[1:]


def _values(channels: list[str], file: str, line: int) -> np.ndarray:
    """[length, channels]; NaN for `?`."""
    counts = [channel.count(",") + 1 for channel in channels]
    if len(set(counts)) > 1:
        lengths = ", ".join(map(str, counts[:20]))
        raise DataFormatError(file, line, f"the channels of a series must have one length, got {lengths}")
    values = np.empty((len(channels), counts[0]))
    try:
        for row, channel in zip(values, channels, strict=True):
            row[:] = np.fromiter(map(float, _fields(channel)), dtype=float, count=counts[0])
    except ValueError:
        row[:] = np.inf
    if np.isinf(values).any() or any("_" in channel or not channel.isascii() for channel in channels):
        for c, channel in enumerate(channels, 1):
            for t, text in enumerate(_fields(channel), 1):
                if not _is_number(text):
                    raise DataFormatError(
                        file, line, f"channel {c}, step {t}: {_short(text)} is not a number; a missing value is '?'"
                    )
    return values.T


def _fields(channel: str) -> Iterable[str]:
    """What stands between commas; of a line as long as a file one at a time, for words take much more than letters."""
    if len(channel) < 1 << 20:
        return channel.replace("?", "nan").split(",")
    return (field[1].replace("?", "nan") for field in re.finditer("(?:^|,)([^,]*)", channel))


def _is_number(text: str) -> bool:
    try:
        return "_" not in text and text.isascii() and not np.isinf(float(text))
    except ValueError:
        return False


def _label(text: str, kind: Kind, file: str, line: int) -> str:
    if kind == "classification" and text in ("", "?", "nan"):
        raise DataFormatError(file, line, f"the class is missing: the line ends in {text!r}")
    if kind == "regression" and (not _is_number(text) or text == "nan"):
        raise DataFormatError(file, line, f"the target must be a finite number, got {_short(text)}")
    return text


def _stamped(line: str, file: str, number: int) -> list[str]:
    """`(time,value),(time,value):…:label` as `value,value:…:label`; a time may hold colons of its own."""
    *channels, label = re.split(r"\)\s*:", line)
    for i, channel in enumerate(channels):
        pairs = re.findall(r"\(([^()]*)\)", channel + ")")
        if not pairs or re.sub(r"\([^()]*\)|[\s,]", "", channel + ")") or not all("," in pair for pair in pairs):
            raise DataFormatError(
                file, number, f"channel {i + 1}: expected (time,value) pairs as @timeStamps says; got {_short(channel)}"
            )
        channels[i] = ",".join(pair.rpartition(",")[2] for pair in pairs)
    return [*channels, label]


def _agree(counts: list[int], declared: tuple[int, int] | None, what: str, file: str, at: list[int]) -> list[Doubt]:
    """Every series has as many; a header that alone says otherwise is a doubt."""
    if len(set(counts)) > 1:
        expected = declared[1] if declared and declared[1] in counts else max(set(counts), key=counts.count)
        odd = next(i for i, count in enumerate(counts) if count != expected)
        raise DataFormatError(file, at[odd], f"expected {expected} {what} as in other series, got {counts[odd]}")
    if declared and declared[1] != counts[0]:
        return [Doubt(declared[0], f"the header says {declared[1]} {what}, the series have {counts[0]}")]
    return []


def _hint(label: str) -> str:
    return "; the name of a class has no spaces" if " " in label else ""


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
