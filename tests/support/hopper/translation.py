"""PTX as Python: an instruction becomes a call of numpy for all threads of a program at once.

A register is an array with a number for every thread. `%r7` is `r7` as it is without a sign, `r7s` with one and `r7f`
as a float; all three are the same memory. What is not arithmetic is a method of `Program` (`machine`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .ptx import Instruction, Kernel, Operand

_UNARY = {
    "neg": "negative", "abs": "absolute", "not": "invert", "ex2": "exp2", "lg2": "log2", "sqrt": "sqrt",
    "rcp": "reciprocal", "rsqrt": "inverse_root",
}  # fmt: skip
_BINARY = {
    "add": "add", "sub": "subtract", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "shl": "left_shift", "shr": "right_shift", "rem": "fmod",
}  # fmt: skip
_COMPARISONS = {
    "eq": "equal", "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal", "ne": "not_equal",
    "lo": "less", "ls": "less_equal", "hi": "greater", "hs": "greater_equal",
}  # fmt: skip
_UNORDERED = {"equ": "ne", "neu": "eq", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}
"""Comparisons that hold where one is no number, and those that do not where they do."""
_TOGETHER = ("bar", "cp", "mma", "wgmma", "ldmatrix", "stmatrix", "shfl")
"""What all threads of a program must come to, and in one order."""
_NOTHING = (("bar", "warp", "sync"), ("wgmma", "fence", "sync", "aligned"))
"""What asks for an order that there is already."""
_OTHERWISE = {"sat", "cc", "rz", "rm", "rp", "rzi", "rmi", "rpi", "relu"}
"""Other ways to round, or to end up."""
_SPECIAL = {"%tid.x", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z"}
_KINDS = {f"{of}{bits}" for of in "bus" for bits in (16, 32, 64)} | {"f16", "f32"}
_DTYPES = {"b": "u", "u": "u", "s": "i", "f": "f"}


class Step(NamedTuple):
    """An instruction, and which threads do it: as an argument, and as one of numpy's."""

    op: tuple[str, ...]
    operands: Any
    mask: str
    where: str


class Translation:
    """The source of a kernel's blocks, and the numbers that it names; where threads have parted, for `active` ones."""

    def __init__(self, kernel: Kernel, parted: bool = False) -> None:
        self.kernel, self.parted = kernel, parted
        self.constants: dict[str, Any] = {}
        self.lines: list[int] = []
        """Of the PTX, for every line of the source."""
        written: list[str] = []

        def write(line: int, *source: str) -> None:
            written.extend(source)
            self.lines += [line] * len(source)

        names = list(kernel.blocks)
        for block, self.following in zip(names, [*map(function, names[1:]), "end"], strict=True):
            write(0, f"def {function(block)}():")
            for step in kernel.blocks[block]:
                try:
                    write(step.line, *(f"    {line}" for line in self.step(step)))
                except (AttributeError, KeyError, NotImplementedError, ValueError) as error:
                    raise NotImplementedError(f"line {step.line}: {'.'.join(step.op)} {step.operands}") from error
            write(0, f"    return {self.following}")
        self.source = "\n".join([*written, "def end(): pass"])

    def step(self, step: Instruction) -> list[str]:
        """Python for an instruction."""
        guards = ["active"] if self.parted else []
        if step.guard is not None:
            guards.append(f"~{name(step.guard[1:])}" if step.guard[0] == "!" else name(step.guard))
        mask = " & ".join(guards)
        if step.op in _NOTHING:
            return ["pass"]
        if _OTHERWISE & set(step.op):
            raise NotImplementedError
        if self.parted and step.op[0] in _TOGETHER:
            return ["program.parted()"]
        now = Step(step.op, step.operands, mask or "None", f", where={mask}" if mask else "")
        if step.op[0] in _UNARY or step.op[0] in _BINARY:
            return [self.plain(now)]
        found = getattr(self, f"_{step.op[0]}")(now)
        return [found] if isinstance(found, str) else found

    def __call__(self, operand: Operand, kind: str) -> str:
        """A register or a number, as this kind."""
        if kind not in _KINDS or not isinstance(operand, str):  # such as arithmetic in bfloat16, or two at once
            raise NotImplementedError
        if operand in self.kernel.registers:
            return name(operand) + {"u": "", "b": "", "s": "s", "f": "f"}[kind[0]]
        if operand in _SPECIAL:
            return f"program.special[{operand!r}]"
        size = width(kind)
        if operand[:2] in ("0f", "0F"):
            bits = int(operand[2:], 16)
        else:
            bits = int("0" if operand == "global_smem" else operand.rstrip("U"), 0) & (1 << 8 * size) - 1
        called = f"c{bits:x}_{kind}"
        self.constants[called] = np.dtype(f"u{size}").type(bits).view(f"{_DTYPES[kind[0]]}{size}")
        return called

    def all(self, operands: Operand, kind: str) -> str:
        return f"({''.join(f'{self(x, kind)}, ' for x in ([operands] if isinstance(operands, str) else operands))})"

    def address(self, operand: Operand, space: str) -> str:
        base, offset = operand
        kind = "u32" if space == "shared" else "u64"
        return self(base, kind) if int(offset, 0) == 0 else f"{self(base, kind)} + {self(offset, kind)}"

    # arithmetic

    def plain(self, step: Step) -> str:
        """What numpy has a function for."""
        head, kind = step.op[0], step.op[-1]
        called = (_UNARY | _BINARY)[head]
        if kind == "pred":
            called = "logical_not" if head == "not" else called.replace("bitwise", "logical")
            out, *of = map(name, step.operands)
        else:
            signed = kind[0] == "f" or head in ("shr", "rem", "neg", "abs")
            view = kind if signed else f"u{kind[1:]}"
            out, *of = (
                self(x, "u32" if head in ("shl", "shr") and n == 2 else view) for n, x in enumerate(step.operands)
            )
        return f"{called}({', '.join(of)}, {out}{step.where})"

    def _max(self, step: Step) -> str:
        out, a, b = (self(x, step.op[-1]) for x in step.operands)
        head, ignoring = step.op[0], step.op[-1][0] == "f" and "NaN" not in step.op
        return f"{f'f{head}' if ignoring else f'{head}imum'}({a}, {b}, {out}{step.where})"

    _min = _max

    def wide(self, kind: str, *operands: str) -> str:
        """A product in twice the bits, and their kind."""
        dtype = f"{_DTYPES[kind[0]]}{2 * width(kind)}"
        return " * ".join(f"{self(x, kind)}.astype({dtype})" for x in operands)

    def _mul(self, step: Step) -> str:
        out, a, b = step.operands
        how, kind = step.op[1], step.op[-1]
        if how == "wide":
            return f"copyto({self(out, f'{kind[0]}{16 * width(kind)}')}, {self.wide(kind, a, b)}{step.where})"
        if how == "hi":
            return f"copyto({self(out, kind)}, {self.wide(kind, a, b)} >> {8 * width(kind)}, 'unsafe'{step.where})"
        view = kind if kind[0] == "f" else f"u{kind[1:]}"
        return f"multiply({self(a, view)}, {self(b, view)}, {self(out, view)}{step.where})"

    def _mad(self, step: Step) -> str:
        out, a, b, c = step.operands
        how, kind = step.op[1:]
        if how == "wide":
            double = f"{kind[0]}{16 * width(kind)}"
            return f"add({self.wide(kind, a, b)}, {self(c, double)}, {self(out, double)}{step.where})"
        if how != "lo":
            raise NotImplementedError
        view = f"u{kind[1:]}"
        return f"add({self(a, view)} * {self(b, view)}, {self(c, view)}, {self(out, view)}{step.where})"

    def _fma(self, step: Step) -> str:
        if step.op[-1] != "f32":
            raise NotImplementedError
        out, a, b, c = (self(x, "f32") for x in step.operands)
        return f"copyto({out}, multiply({a}, {b}, dtype=f8) + {c}, 'unsafe'{step.where})"

    def _div(self, step: Step) -> str:
        out, a, b = (self(x, step.op[-1]) for x in step.operands)
        if step.op[-1] == "f32":
            return f"divide({a}, {b}, {out}{step.where})"
        return f"copyto({out}, quotient({a}, {b}), 'unsafe'{step.where})"

    def _bfe(self, step: Step) -> str:
        out, a, start, length = step.operands
        kind, bits = step.op[1], 8 * width(step.op[1])
        raised = f"left_shift({self(a, f'u{bits}')}, {bits - int(start) - int(length)})"
        dtype = f"{_DTYPES[kind[0]]}{bits // 8}"
        return f"right_shift({raised}.view({dtype}), {bits - int(length)}, {self(out, kind)}{step.where})"

    def _shf(self, step: Step) -> str:
        out, low, high, by = step.operands
        if step.op != ("shf", "l", "wrap", "b32"):
            raise NotImplementedError
        both = f"({self(high, 'u32')}.astype(u8) << 32 | {self(low, 'u32')})"
        return f"copyto({self(out, 'u32')}, {both} << ({self(by, 'u32')} & 31) >> 32, 'unsafe'{step.where})"

    def _prmt(self, step: Step) -> str:
        if step.op != ("prmt", "b32"):
            raise NotImplementedError
        out, a, b, which = (self(x, "u32") for x in step.operands)
        return f"copyto({out}, picked({a}, {b}, {which}), 'unsafe'{step.where})"

    def _setp(self, step: Step) -> list[str]:
        out, a, b = step.operands[:3]
        kind = step.op[-1]
        if kind[-2:] == "x2":  # two at once, for two predicates
            pairs = [[f"from_{kind[:-2]}({self(x, 'u32')} >> {by} & 65535)" for x in (a, b)] for by in (0, 16)]
        elif kind == "bf16":
            pairs = [[f"from_bf16({self(x, 'u16')})" for x in (a, b)]]
        else:
            pairs = [[self(x, kind) for x in (a, b)]]
        lines = []
        for predicate, (first, second) in zip(out.split("|"), pairs, strict=True):
            found = f"{_COMPARISONS[_UNORDERED.get(step.op[1], step.op[1])]}({first}, {second})"
            if step.op[1] in _UNORDERED:
                found = f"~{found}"
            elif step.op[1] == "ne" and "f" in kind:
                found = f"({first} < {second}) | ({first} > {second})"
            if len(step.op) == 4:  # and, or: with another
                found = f"logical_{step.op[2]}({found}, {name(step.operands[3])})"
            lines.append(f"copyto({name(predicate)}, {found}{step.where})")
        return lines

    # moves

    def _mov(self, step: Step) -> str | list[str]:
        out, a = step.operands
        kind = f"u{step.op[1][1:]}"
        if step.op[1] == "pred":
            return f"copyto({name(out)}, {name(a) if a in self.kernel.registers else int(a) != 0}{step.where})"
        if isinstance(out, tuple):
            return [f"copyto({self(part, 'u16')}, {self(a, 'u32')} >> {16 * n}, 'unsafe'{step.where})"
                    for n, part in enumerate(out) if part != "_"]  # fmt: skip
        if isinstance(a, tuple):
            low, high = (self(part, "u16") for part in a)
            return f"copyto({self(out, 'u32')}, {low} | {high}.astype(u4) << 16{step.where})"
        return f"copyto({self(out, kind)}, {self(a, kind)}{step.where})"

    def _selp(self, step: Step) -> str:
        *operands, which = step.operands
        out, a, b = (self(x, f"u{step.op[1][1:]}") for x in operands)
        return f"copyto({out}, choose({name(which)}, {a}, {b}){step.where})"

    def _cvt(self, step: Step) -> str:
        to, of = step.op[-2:]
        out, a = step.operands[:2]
        if to in ("bf16x2", "f16x2"):
            high, low = (f"{to[:-2]}({self(x, 'f32')})" for x in step.operands[1:])
            return f"copyto({self(out, 'u32')}, {high} << 16 | {low}{step.where})"
        if of in ("bf16", "f16"):
            return f"copyto({self(out, 'f32')}, from_{of}({self(a, 'u16')}){step.where})"
        if to in ("bf16", "f16"):
            number = self(a, "f32") if of[0] == "f" else f"single({self(a, of)})"
            return f"copyto({self(out, 'u16')}, {to}({number}), 'unsafe'{step.where})"
        if of[0] == "f" and to[0] != "f":
            raise NotImplementedError
        return f"copyto({self(out, to)}, {self(a, of)}, 'unsafe'{step.where})"

    # memory

    def _ld(self, step: Step) -> str:
        out, at = step.operands
        space, kind = step.op[1], step.op[-1]
        if space == "param":
            to = self(out, f"{'s' if kind[0] == 's' else 'u'}{8 * self.kernel.registers[out]}")
            return f"copyto({to}, program.parameter({at[0]!r}, {kind[0] == 's'}), 'unsafe'{step.where})"
        return f"program.load_{space}({self.values(out, kind)}, {self.address(at, space)}, {width(kind)}, {step.mask})"

    def _st(self, step: Step) -> str:
        at, values = step.operands
        space, kind = step.op[1], step.op[-1]
        return (
            f"program.store_{space}({self.address(at, space)}, {self.values(values, kind)}, {width(kind)}, {step.mask})"
        )

    def values(self, operands: Operand, kind: str) -> str:
        """In registers, of which none has 8 bits."""
        return self.all(operands, f"u{max(16, int(kind[1:]))}")

    def _atom(self, step: Step) -> str:
        out, at, values = step.operands
        if "add" not in step.op or step.op[-1] != "f32" or step.op[1] != "global":
            raise NotImplementedError
        numbers = f"{self.all(out, 'f32')}, {self.address(at, 'global')}, {self.all(values, 'f32')}"
        return f"program.add_global({numbers}, {step.mask})"

    def _cp(self, step: Step) -> str:
        if step.op == ("cp", "async", "commit_group"):
            return "program.shared.commit()"
        if step.op == ("cp", "async", "wait_group"):
            return f"program.shared.wait({int(step.operands[0])})"
        if step.op[-2:] != ("shared", "global"):
            raise NotImplementedError
        to, of, size, *given = step.operands
        bytes_given = self(given[0], "u32") if given else "None"
        places = f"{self.address(to, 'shared')}, {self.address(of, 'global')}"
        return f"program.copy({places}, {int(size, 0)}, {bytes_given}, {step.mask})"

    # threads and launches together

    def _bra(self, step: Step) -> str:
        to = function(step.operands[0])
        return (
            f"return {to}"
            if step.mask in ("None", "active")
            else f"return program.branch({step.mask}, {to}, {self.following})"
        )

    def _ret(self, step: Step) -> str:
        if step.mask not in ("None", "active"):
            raise NotImplementedError
        return "return end"

    def _bar(self, step: Step) -> str:
        if step.op != ("bar", "sync") or step.operands != ("0",) or step.where:
            raise NotImplementedError
        return "program.shared.barrier()"

    def _fence(self, step: Step) -> str:
        if step.op != ("fence", "proxy", "async", "shared::cta"):
            raise NotImplementedError
        return "program.shared.fence()"

    def _griddepcontrol(self, step: Step) -> str:
        return {"wait": "program.trace.waited = True", "launch_dependents": "program.trace.release()"}[step.op[1]]

    def _shfl(self, step: Step) -> str:
        out, a, lane, clamp = step.operands[:4]
        if clamp != "31" or step.op[2] not in ("bfly", "idx"):
            raise NotImplementedError
        moved = f"program.shuffled({self(a, 'u32')}, {self(lane, 'u32')}, {step.op[2]!r})"
        return f"copyto({self(out, 'u32')}, {moved}{step.where})"

    def _ldmatrix(self, step: Step) -> str:
        out, at = step.operands
        return f"program.load_matrices({self.all(out, 'u32')}, {self.address(at, 'shared')}, {'trans' in step.op})"

    def _stmatrix(self, step: Step) -> str:
        at, values = step.operands
        return f"program.store_matrices({self.address(at, 'shared')}, {self.all(values, 'u32')}, {'trans' in step.op})"

    def _mma(self, step: Step) -> str:
        shape, *_, out, kind, _, _ = step.op[3:]
        if shape not in ("m16n8k16", "m16n8k8") or step.op[4:6] != ("row", "col") or out != "f32":
            raise NotImplementedError
        kinds = zip(step.operands, ("f32", "u32", "u32", "f32"), strict=True)
        return f"program.mma({', '.join(self.all(x, as_kind) for x, as_kind in kinds)}, {kind!r})"

    def _wgmma(self, step: Step) -> str:
        if step.op[1] == "commit_group":
            return "program.products.commit()"
        if step.op[1] == "wait_group":
            return f"program.products.wait({int(step.operands[0])})"
        out, a, b, adds, *rest = step.operands
        if rest[:2] != ["1", "1"] or step.op[5] != "f32":
            raise NotImplementedError
        turned = (False, *(text == "1" for text in rest[2:]))[-2:] if len(rest) > 2 else (False, False)
        adding = f"program.agreed({name(adds)})" if adds in self.kernel.registers else adds != "0"
        return f"program.products.begin({out!r}, {a!r}, {b!r}, {adding}, {step.op[6]!r}, {turned})"


def width(kind: str) -> int:
    """In bytes, of such as u32."""
    return int(kind[1:]) // 8


def name(register: Operand) -> str:
    """In Python."""
    if not isinstance(register, str) or not register.lstrip("%").isidentifier():
        raise NotImplementedError
    return register.replace("%", "")


def function(block: str) -> str:
    return f"block_{block.replace('$', '')}"
