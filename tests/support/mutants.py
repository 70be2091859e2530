"""Inputs that are almost right: bytes and JSON with a few changes, from a seed."""

import copy
import json
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

TOKENS = (
    b"\0", b"\xff", b"\n", b",", b":", b"@", b"?", b"(", b")", b"-", b"nan", b"1e999", b"9" * 30, b"\xc2\xb2", b"true",
    b"false", b"@data\n", b"{", b"[", b'"', b"PK\1\2", b"\xff" * 8, struct.pack("<Q", 1 << 40),
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 10**9, 2**31, 2**63, 10**400, -(2**31), 0.5, 1e308, float("nan"), float("inf"),
    "", "yes", "0", "x" * 5000, [], [1], [[]], {}, {"kind": "Primal"}, {"kind": ["a"]},
    {"kind": "Recenter", "beta": "1"}, {"kind": "DepthwiseConv1d", "size": 2**40}, {"kind": "Taylor", "degree": 2**40},
)  # fmt: skip


def of_bytes(data: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """So many, each with one to three changes."""
    draw = random.Random(seed)
    for _ in range(count):
        found = bytearray(data)
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            _CHANGES[draw.randrange(len(_CHANGES))](found, draw)
        yield bytes(found)


def _flip(data: bytearray, draw: random.Random) -> None:
    if data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def _token(data: bytearray, draw: random.Random) -> None:
    at = draw.randrange(len(data) + 1)
    data[at : at + draw.choice((0, 1, 4))] = draw.choice(TOKENS)


def _cut(data: bytearray, draw: random.Random) -> None:
    start = draw.randrange(len(data) + 1)
    del data[start : start + draw.choice((1, 2, 30, len(data)))]


def _twice(data: bytearray, draw: random.Random) -> None:
    start = draw.randrange(len(data) + 1)
    data[start:start] = data[start : start + draw.choice((1, 10, 200))]


def _digit(data: bytearray, draw: random.Random) -> None:
    places = [i for i, byte in enumerate(data) if 48 <= byte <= 57]
    if places:
        data[draw.choice(places)] = draw.choice(b"0123456789-.e")


_CHANGES: tuple[Callable[[bytearray, random.Random], None], ...] = (_flip, _flip, _token, _cut, _twice, _digit)


def of_json(data: Any, count: int, seed: int = 0) -> Iterator[Any]:
    """So many, each with one value or name changed, left out, doubled or wrapped in many levels; never data itself."""
    draw = random.Random(seed)
    while count:
        found = copy.deepcopy(data)
        holder, place = draw.choice(list(_places(found)))
        match draw.randrange(8):
            case 0:
                del holder[place]
            case 1 if isinstance(holder, list):
                holder.insert(place, copy.deepcopy(holder[place]))
            case 1 | 2 if isinstance(holder, dict):
                holder[draw.choice(("kind", "", str(place) + "s", "x" * 300))] = holder.pop(place)
            case 3 if type(holder[place]) in (int, float):
                holder[place] += draw.choice((1, -1, 0.5, 100))
            case 4:
                for _ in range(draw.choice((1, 70, 700))):
                    holder[place] = draw.choice(([holder[place]], {"kind": "Sparse", "over": holder[place]}))
            case 5:
                other, there = draw.choice(list(_places(data)))
                holder[place] = copy.deepcopy(other[there])
            case _:
                holder[place] = copy.deepcopy(draw.choice(VALUES))
        if repr(found) != repr(data):
            count -= 1
            yield found


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in dicts and lists."""
    if isinstance(data, dict | list):
        for place, value in list(data.items() if isinstance(data, dict) else enumerate(data)):
            yield data, place
            yield from _places(value)


def as_file(data: Any) -> str:
    """JSON as a file may have it, with what is no JSON."""
    return json.dumps(data)
