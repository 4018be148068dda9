"""A kernel's lowered IR as a C program that counts what the kernel would do, and does none of it.

The IR is the linalg that Ascend's own compiler gets (`hal.lowered.Lowered.ttadapter`): loops and scalars in it stay,
and are run on the real arguments, so that lengths, slots and masks decide as they do on the device; an operation on a
tensor is a sum of counters, a copy is its address and its extents. A tensor's values are computed in one case alone,
where a scalar is reduced from a copy; what else hangs on a tensor's values is refused (`HalError`), never guessed.
"""

from __future__ import annotations

import re

from hal._errors import HalError
from hal.bench.ascend.ir import (
    BINARY,
    BYTES,
    COMPARE,
    FREE,
    KINDS,
    OP,
    SLOW,
    SOURCE,
    TENSOR,
    UNSIGNED,
    Emitter,
    Memory,
    c_name,
    elements,
    mask_of,
    types_of,
)


def program(ttadapter: str, name: str) -> str:
    """The C source; its ``count(pointers, numbers, grid, out)`` adds each program's counters into `out`."""
    return _Translation(name).run(ttadapter)


class _Translation(Emitter):
    def run(self, text: str) -> str:
        lines = [line.strip() for line in text.splitlines()]
        at = next(i for i, line in enumerate(lines) if line.startswith("func.func"))
        head = self._arguments(lines[at])
        at += 1
        while lines[at] != "return":
            at = self._line(lines, at)
        body = "\n".join(self.out)
        return SOURCE.replace("HEAD", head).replace("BODY", body).replace("SITES", str(max(1, self.sites)))

    def _arguments(self, line: str) -> str:
        found = re.findall(r"(%arg\d+): (memref<\?x(\w+)>|\w+)", line[: line.rindex(" attributes ")])
        named, last = found[2:-6], found[-6:]
        out, pointers, numbers = [], 0, 0
        for value, type_, item in named:
            if item:
                self.memory[value] = Memory(BYTES[item], f"p[{pointers}]", sizes=["1"], strides=["1"])
                pointers += 1
            else:
                out.append(f"{'double' if type_[0] == 'f' else 'int64_t'} {c_name(value)} = n[{numbers}].{type_[0]};")
                numbers += 1
        out += [
            f"int64_t {c_name(v)} = {e};" for (v, _, _), e in zip(last, ("gx", "gy", "gz", "x", "y", "z"), strict=True)
        ]
        return " ".join(out)

    def _line(self, lines: list[str], at: int) -> int:
        line = lines[at]
        if line.startswith(("}", "^bb0")):
            self._close(line)
            return at + 1
        m = OP.match(line)
        if m is None:
            raise HalError(f"hal: bench: kernel {self.name}: a line of its IR is not understood: {line[:120]}")
        result, count, op, rest = m[1], int(m[2] or 1), m[3], m[4]
        results = [result] if count == 1 and result else [f"{result}#{i}" for i in range(count)] if result else []
        if op.startswith("scf."):
            self._control(op, rest, results, line)
        elif op in ("linalg.reduce", "linalg.generic"):
            # The region is the next lines, as far as its yield's brace.
            end = next(i for i in range(at, len(lines)) if lines[i].startswith("}"))
            self._region(op, line, lines[at + 1 : end], lines[end], result)
            return end + 1
        else:
            self._op(op, rest, result, line)
        return at + 1

    # Operations

    def _op(self, op: str, rest: str, result: str | None, line: str) -> None:
        shapes = TENSOR.findall(line)
        used = re.findall(r"%[\w#-]+", rest)
        if op == "memref.load":
            self._load(result or "", used, line)
        elif op in ("memref.reinterpret_cast", "memref.subview", "memref.alloc", "memref.cast"):
            self._view(op, rest, result or "", line)
        elif op == "memref.copy":
            self._copy(used[0], used[1])
        elif op == "bufferization.materialize_in_destination":
            self._dma("out", self.memory[used[1]])
        elif op == "tensor.extract":
            self._extract(result or "", used[0])
        elif op == "linalg.matmul":
            self._matmul(result or "", used, line)
        elif result is None and op == "linalg.fill":
            dims = re.findall(r"memref<((?:\d+x)+)(\w+)", line)[-1]
            self._vector(op, elements(dims[0]) * BYTES[dims[1]])
        elif op == "bufferization.to_tensor" or (shapes and "tensor<" in rest):
            self._on_tensor(op, used, result or "", shapes)
        elif op not in ("memref.dealloc",):
            self._scalar(op, rest, result or "", used, line)

    def _on_tensor(self, op: str, used: list[str], result: str, shapes: list[tuple[str, str]]) -> None:
        made = "vector"
        if op in ("bufferization.to_tensor", "tensor.expand_shape", "tensor.collapse_shape", "linalg.transpose"):
            self.source[result] = used[0]
            made = "copy" if op == "bufferization.to_tensor" else self._made(used[0])[0]
            if op == "tensor.collapse_shape" and shapes[0][0].count("x") > 2:
                made = "vector"
        if op == "tensor.insert_slice":
            # A row that was just copied in is copied straight to its place.
            if self._made(used[0])[0] != "copy":
                self._vector(op, elements(shapes[0][0]) * BYTES[shapes[0][1]])
        elif op not in FREE and op != "tensor.insert" and op != "arith.constant":
            self._vector(op, max(elements(d) * BYTES[t] for d, t in shapes))
        self.tensor[result] = (made, self.loops[-1])

    def _region(self, op: str, head: str, body: list[str], foot: str, result: str | None) -> None:
        shapes = TENSOR.findall(head)
        size = max(elements(d) * BYTES[t] for d, t in shapes)
        inner = [m[3] for m in map(OP.match, body) if m and m[3] not in ("linalg.yield", "linalg.index")]
        for name in inner if op == "linalg.generic" and inner else [op]:
            self._vector(name, size)
        self.tensor[result or ""] = ("vector", self.loops[-1])
        if op == "linalg.reduce" and "x" not in shapes[-1][0]:
            self.source[result or ""] = re.findall(r"%[\w#-]+", head)[1] + " " + inner[0]

    def _vector(self, op: str, size: int) -> None:
        slow = "slow" if op in SLOW else "repeat"
        self._add("vector", "1")
        self._add(slow, str(-(-size // 256)))

    def _matmul(self, result: str, used: list[str], line: str) -> None:
        (am, item), (bn, _), (cm, _) = TENSOR.findall(line)[:3]
        (m, k), n = map(int, am.split("x")[:2]), int(bn.split("x")[1])
        deep = 8 if item == "f32" else 16
        self._add("cube32" if item == "f32" else "cube", str(-(-m // 16) * -(-k // deep) * -(-n // 16)))
        for value, size in ((used[0], m * k), (used[1], k * n)):
            made, loop = self._made(value)
            # What the vector core made goes to the cube core through memory, once for the loop that it was made in.
            if made == "vector" and loop == self.loops[-1]:
                self._hand_over(size * BYTES[item])
        self._hand_over(elements(cm) * 4)
        self.tensor[result] = ("cube", self.loops[-1])

    def _hand_over(self, size: int) -> None:
        self._add("exchange", "1")
        self._add("exchanged", str(2 * size))

    def _scalar(self, op: str, rest: str, result: str, used: list[str], line: str) -> None:
        kind = rest.rsplit(" : ", 1)[-1].strip() if " : " in rest else "i1"
        target = kind.rsplit(" to ", 1)[-1]
        if op not in FREE:
            self._add("division" if op in ("arith.divsi", "arith.remsi") else "scalar", "1")
        if op == "arith.constant":
            value = rest.split(" : ")[0].strip()
            value = {"true": "1", "false": "0"}.get(value, value)
            if target[0] == "f" and value.startswith("0x"):
                value = "0"
            self._define(
                result, "(-9223372036854775807ll - 1)" if value == "-9223372036854775808" else f"{value}", target
            )
            return
        if any(v in self.unknown for v in used):
            self.unknown.add(result)
            return
        a = [c_name(v) for v in used]
        short = op.split(".")[1]
        if short in ("cmpi", "cmpf"):
            sign = rest.split(",")[0].split()[0]
            if sign in UNSIGNED:
                a = [f"(uint64_t){v}" for v in a]
            signs = COMPARE | UNSIGNED | {"ogt": ">", "olt": "<", "oge": ">=", "ole": "<=", "oeq": "==", "une": "!="}
            self._define(result, f"{a[0]} {signs[sign]} {a[1]}", "i1")
        elif short == "select":
            self._define(result, f"{a[0]} ? {a[1]} : {a[2]}", target)
        elif short in ("extui", "index_castui"):
            self._define(result, f"{a[0]} & {mask_of(kind.split(' to ')[0])}", target)
        elif short in ("extsi", "index_cast", "trunci", "sitofp", "fptosi", "extf", "truncf"):
            self._define(result, a[0], target)
        elif short in BINARY:
            self._define(result, BINARY[short].format(*a, mask=mask_of(target)), target)
        else:
            self.unknown.add(result)

    # Memory

    def _view(self, op: str, rest: str, result: str, line: str) -> None:
        if op == "memref.alloc":
            dims, item = re.findall(r"memref<((?:\d+x)*)(\w+)", line)[-1]
            self.memory[result] = Memory(BYTES[item], None, sizes=[str(elements(dims))], root=result)
            return
        base = self.memory[re.findall(r"%[\w#-]+", rest)[0]]
        if op == "memref.cast":
            self.memory[result] = base
            return
        lists = [[c_name(v.strip()) for v in g.split(",") if v.strip()] for g in re.findall(r"\[([^\]]*)\]", rest)]
        if op == "memref.reinterpret_cast":
            (offset,), sizes, strides = lists[0], lists[1], lists[2]
            self.memory[result] = Memory(base.item, base.argument, offset, sizes, strides)
        else:
            terms = [f"{o} * {s}" for o, s in zip(lists[0], base.strides, strict=False)]
            self.memory[result] = Memory(
                base.item,
                base.argument,
                " + ".join([base.offset, *terms]),
                lists[1],
                [f"{a} * {b}" for a, b in zip(base.strides, lists[2], strict=False)],
                root=base.root,
            )

    def _load(self, result: str, used: list[str], line: str) -> None:
        source = self.memory[used[0]]
        kind = re.findall(r"memref<(?:[\d?]+x)*(\w+)", line)[-1]
        if source.argument is None:
            raise HalError(f"hal: bench: kernel {self.name}: a scalar read from its own buffer is not counted")
        terms = [f"{c_name(i)} * {s}" for i, s in zip(used[1:], source.strides, strict=False)]
        at = f"{source.argument} + ({' + '.join([source.offset, *terms])}) * {source.item}"
        c_type = {"i64": "int64_t", "i32": "int32_t", "i16": "int16_t", "i8": "int8_t", "f32": "float"}.get(kind)
        if c_type is None:
            self.unknown.add(result)
            self.out.append(f"touch(c, &line[{self.sites}], {at});")
        else:
            self._declare(result, kind, f"*({c_type} *)touch(c, &line[{self.sites}], {at})")
        self.sites += 1

    def _copy(self, source: str, target: str) -> None:
        here, there = self.memory[source], self.memory[target]
        if here.argument is None and there.argument is None:
            self._vector("copy", int(here.sizes[0]) * here.item)
        elif there.argument is None:
            self.memory[there.root].copied = here
            self._dma("in", here)
        else:
            self._dma("out", there)

    def _dma(self, way: str, memory: Memory) -> None:
        kind = KINDS.index(way + ("_loop" if self.kinds[-1] == "for" else ""))
        rank = len(memory.sizes)
        self.out.append(
            f"{{ int64_t size[] = {{{', '.join(memory.sizes)}}}, step[] = {{{', '.join(memory.strides)}}}; "
            f"dma(c, {kind}, ({memory.offset}) * {memory.item}, {rank}, size, step, {memory.item}); }}"
        )

    def _extract(self, result: str, value: str) -> None:
        """A scalar that a tensor is reduced to, where the tensor is a copy of global memory."""
        self._add("scalar", "1")
        made = self.source.get(value, "")
        whole, _, op = made.partition(" ")
        memory = self.memory.get(self.source.get(whole, ""))
        c_type = {1: "int8_t", 2: "int16_t", 4: "int32_t", 8: "int64_t"}
        copied = memory.copied if memory else None
        if not op or copied is None or op.split(".")[1] not in BINARY or len(copied.sizes) != 1:
            self.unknown.add(result)
            return
        expression = BINARY[op.split(".")[1]].format("r", "e", mask="-1ll")
        item = c_type[copied.item]
        self._declare(result, "i64", "0")
        self.out.append(
            f"{{ {item} *s = ({item} *)({copied.argument}) + {copied.offset}; "
            f"int64_t r = {copied.sizes[0]} > 0 ? s[0] : 0; for (int64_t i = 1; i < {copied.sizes[0]}; i++) "
            f"{{ int64_t e = s[i]; r = {expression}; }} {c_name(result)} = r; }}"
        )

    # Control

    def _control(self, op: str, rest: str, results: list[str], line: str) -> None:
        if op in ("scf.yield", "scf.condition"):
            self._yield(op, rest)
            return
        self._add("scalar", "2")
        types = types_of(line.rsplit("->", 1)[1]) if "->" in line else []
        for r, t in zip(results, types, strict=False):
            if "tensor" in t:
                self.tensor[r] = ("vector", self.loops[-1])
            else:
                self._declare(r, t, "0")
        pairs = re.findall(r"(%arg\d+) = (%[\w#-]+)", rest)
        if op == "scf.if":
            condition = re.findall(r"%[\w#-]+", rest)[0]
            self._refuse(condition)
            self.out.append(f"if ({c_name(condition)}) {{")
            self.stack.append(("if", results, []))
            return
        carried = pairs[1:] if op == "scf.for" else pairs
        self.out.append("{")
        self.made += 1
        kinds = types if op == "scf.for" else types_of(line.split(" : ", 1)[1])
        # What a while loop carries has a name of its own: those of its two regions come again, the one in the other.
        names = [arg if op == "scf.for" else f"%carry{self.made}_{i}" for i, (arg, _) in enumerate(carried)]
        for name, (_, start), t in zip(names, carried, kinds, strict=True):
            if "tensor" in t:
                self.tensor[name] = ("vector", -1)
            else:
                self._refuse(start)
                self._declare(name, t, c_name(start))
        self.loops.append(self.made)
        self.kinds.append(op.split(".")[1])
        if op == "scf.for":
            arg, first = pairs[0]
            last, step = re.search(r" to (%[\w#-]+) step (%[\w#-]+)", rest).groups()  # type: ignore[union-attr]
            for v in (first, last, step):
                self._refuse(v)
            i = c_name(arg)
            self.out.append(f"for (int64_t {i} = {c_name(first)}; {i} < {c_name(last)}; {i} += {c_name(step)}) {{")
            self._add("scalar", "2")
        else:
            self.out.append("for (;;) {")
            for name, (arg, _), t in zip(names, carried, kinds, strict=True):
                if "tensor" in t:
                    self.tensor[arg] = ("vector", -1)
                else:
                    self._declare(arg, t, c_name(name))
        self.stack.append((op.split(".")[1], results, names))

    def _yield(self, op: str, rest: str) -> None:
        values = re.findall(r"%[\w#-]+", rest.split(" : ")[0])
        kind, results, carried = self.stack[-1]
        targets = carried
        flag = values[0] if op == "scf.condition" else ""
        if flag:
            self._refuse(flag)
            values, targets = values[1:], results
        elif kind == "if":
            targets = results
        pairs = [(t, v) for t, v in zip(targets, values, strict=False) if t not in self.tensor]
        for _, v in pairs:
            self._refuse(v)
        self.out += [f"__auto_type next{i} = {c_name(v)};" for i, (_, v) in enumerate(pairs)]
        self.out += [f"{c_name(t)} = next{i};" for i, (t, _) in enumerate(pairs)]
        if flag:
            self.out.append(f"if (!{c_name(flag)}) break;")

    def _close(self, line: str) -> None:
        kind, results, carried = self.stack[-1]
        if line.startswith("} else"):
            self.out.append("} else {")
        elif line.startswith("} do"):
            self.out.append("{")
        elif line.startswith("^bb0"):
            args = re.findall(r"(%\w+): ([^,)]*(?:<[^>]*>)?)", line)
            for (arg, t), r in zip(args, results, strict=False):
                if "tensor" in t:
                    self.tensor[arg] = ("vector", -1)
                else:
                    self._declare(f"{arg}_", t, c_name(r))
                    self._declare(arg, t, c_name(f"{arg}_"))
        else:
            self.stack.pop()
            if kind != "if":
                self.loops.pop()
                self.kinds.pop()
            self.out.append("} }" if kind == "while" else "}")
            if kind == "for":
                self.out += [
                    f"{c_name(r)} = {c_name(a)};" for r, a in zip(results, carried, strict=True) if r not in self.tensor
                ]
            if kind != "if":
                self.out.append("}")
