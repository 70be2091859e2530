"""Reading PTX: the instructions of a kernel, in basic blocks."""

from __future__ import annotations

import re
from typing import NamedTuple

_WIDTHS = {"pred": 1, "b16": 2, "u16": 2, "b32": 4, "u32": 4, "f32": 4, "b64": 8, "u64": 8}
Operand = str | tuple[str, ...]
"""A register, a number, a name; or several of these, in braces. An address is (base, offset) in brackets."""


class Instruction(NamedTuple):
    line: int
    guard: str | None
    """The predicate under which it is done; with a `!` in front, under which it is not."""
    op: tuple[str, ...]
    operands: tuple[Operand, ...]


class Kernel(NamedTuple):
    name: str
    threads: int
    parameters: dict[str, int]
    """Their sizes in bytes."""
    registers: dict[str, int]
    """Their sizes in bytes; 1 for predicates."""
    blocks: dict[str, tuple[Instruction, ...]]


def read(text: str) -> Kernel:
    """The one kernel of a module, as Triton writes it."""
    found = re.search(r"\.entry\s+(\w+)\((.*?)\)\s*\.reqntid\s+(\d+)[^{]*\n\{", text, re.DOTALL)
    if found is None:
        raise ValueError("no kernel with .reqntid in this PTX")
    parameters = {
        name: 8 if wide in ("u64", "b64") else 4
        for wide, name in re.findall(r"\.param\s+\.(\w+)\s.*?(\w+)\s*(?:,|$)", found[2], re.MULTILINE)
    }
    registers: dict[str, int] = {}
    blocks: dict[str, list[Instruction]] = {"": []}
    block = blocks[""]
    body = text[found.end() : text.index("\n}", found.end())]  # the braces of inline assembly are further right
    for number, line in enumerate(body.split("\n"), text.count("\n", 0, found.end()) + 1):
        line = line.split("//")[0].strip()
        if declared := re.match(r"\.reg\s+\.(\w+)\s+(.*);", line):
            for base, count in re.findall(r"([%\w]+)(?:<(\d+)>)?", declared[2]):
                names = [f"{base}{n}" for n in range(int(count))] if count else [base]
                registers |= dict.fromkeys(names, _WIDTHS[declared[1]])
        elif label := re.fullmatch(r"(\$\w+):", line):
            block = blocks.setdefault(label[1], [])
        elif line and line[0] not in "{}.":
            block.append(_instruction(number, line))
            if block[-1].op[0] == "bra":
                block = blocks[f"after_{number}"] = []
    used = {name for block in blocks.values() for step in block for name in _names(step)}
    registers = {name: width for name, width in registers.items() if name in used}
    return Kernel(found[1], int(found[3]), parameters, registers, {k: tuple(v) for k, v in blocks.items()})


def meeting(kernel: Kernel, block: int) -> int:
    """Where threads that part after a block are together again: the first that every way from there to the end takes.

    Blocks are counted; the last number is that of the end.
    """
    names = list(kernel.blocks)
    place = {name: n for n, name in enumerate(names)}
    end = len(names)
    ways: list[set[int]] = []
    for n, name in enumerate(names):
        last = kernel.blocks[name][-1] if kernel.blocks[name] else None
        if last is None or last.op[0] not in ("bra", "ret"):
            ways.append({n + 1})
        elif last.op[0] == "ret":
            ways.append({end})
        else:
            ways.append({place[str(last.operands[0])]} | ({n + 1} if last.guard else set()))
    through = [set(range(end + 1)) for _ in names] + [{end}]
    changed = True
    while changed:
        changed = False
        for n in reversed(range(end)):
            found = {n} | set.intersection(*(through[way] for way in ways[n]))
            changed |= found != through[n]
            through[n] = found
    return max(through[block] - {block}, key=lambda n: len(through[n]))


def _instruction(number: int, line: str) -> Instruction:
    parts = re.fullmatch(r"(?:@(!?[%\w]+)\s+)?([\w.:]+)\s*(.*);", line)
    if parts is None:
        raise ValueError(f"line {number}: what is this? {line}")
    operands: list[Operand] = []
    for text in re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s][^,]*", parts[3]):
        if text[0] == "{":
            operands.append(tuple(re.findall(r"[^\s,{}]+", text)))
        elif text[0] == "[":
            base, _, offset = text[1:-1].partition("+")
            operands.append((base.strip(), offset.strip() or "0"))
        else:
            operands.append(text.strip())
    return Instruction(number, parts[1], tuple(parts[2].split(".")), tuple(operands))


def _names(step: Instruction) -> list[str]:
    names = [step.guard.lstrip("!")] if step.guard else []
    for operand in step.operands:
        names += [operand] if isinstance(operand, str) else operand
    return names
