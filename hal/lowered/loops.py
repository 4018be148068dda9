"""Orders the loops of a kernel's linalg so that LLVM makes vector code of them. What is computed stays the same."""

from __future__ import annotations

import re

# What costs less than a buffer to keep it in; and any value, where it is defined and where it is used.
_CHEAP = re.compile(r"\s*%[\w.]+ = (?:linalg\.broadcast|arith\.(?:extf|extsi|sitofp)) .*tensor<")
_DEFINED = re.compile(r"\s*(%[\w.]+)(?::\d+)? = ")
_VALUE = re.compile(r"%[\w.]+")
_MAP = re.compile(r"^(#\w+) = affine_map<\(([^)]*)\) -> \(([^)]*)\)>$")
_REDUCTION = re.compile(
    r"^(\s*linalg\.generic \{indexing_maps = )\[([#\w, ]+)\](, iterator_types = )\[(.*reduction.*?)\]"
)
# A sum may be taken in any order, as the device takes it in one of its own.
_SUM = re.compile(r"(arith\.addf (?:%\w+, %(?:init|out)\w*|%(?:init|out)\w*, %\w+)) : ")


def apart(module: str) -> str:
    """Linalg on tensors, in which each use of a broadcast or a conversion has one of its own: that goes into the loop
    which uses it, where one that is shared would be a loop and a buffer.

    Example:
        >>> print(apart("%1 = arith.extf %0 : tensor<4xbf16> to tensor<4xf32>\\n%2 = arith.mulf %1, %1"))
        %1 = arith.extf %0 : tensor<4xbf16> to tensor<4xf32>
        %again1_1 = arith.extf %0 : tensor<4xbf16> to tensor<4xf32>
        %2 = arith.mulf %1, %again1_1
    """
    out: list[list[str]] = []
    shared: dict[str, list[int]] = {}  # name -> where it is in `out`, and its uses so far

    def use(found: re.Match[str]) -> str:
        name = found[0]
        if name not in shared:
            return name
        where, uses = shared[name]
        shared[name][1] += 1
        if not uses:
            return name
        again = f"%again{uses}_{name[1:]}"
        head, _, rest = out[where][0].partition(f"{name} = ")
        out[where].append(f"{head}{again} = {_VALUE.sub(use, rest)}")
        return again

    for line in module.splitlines():
        defined = _DEFINED.match(line)
        begin = defined.end() if defined else 0
        out.append([line[:begin] + _VALUE.sub(use, line[begin:])])
        if defined:
            shared.pop(defined[1], None)  # another scope's of the same name
            if _CHEAP.match(line):
                shared[defined[1]] = [len(out) - 1, 0]
    return "\n".join(line for lines in out for line in lines)


def order_loops(module: str) -> str:
    """Linalg on buffers, whose reductions have the loop innermost in which most operands are contiguous."""
    maps: dict[str, tuple[list[str], str]] = {}
    out: list[str] = []
    inside = False
    lines = module.splitlines()
    for number, line in enumerate(lines):
        if match := _MAP.match(line):
            maps[match[1]] = match[2].split(", "), match[3]
        elif match := _REDUCTION.match(line):
            inside = True
            body = lines[number : next(i for i in range(number, len(lines)) if "linalg.yield" in lines[i])]
            if not any("linalg.index" in each for each in body):
                line = _inward(line, match, maps)
        elif inside:
            line = _SUM.sub(r"\1 fastmath<reassoc> : ", line)
            inside = "linalg.yield" not in line
        out.append(line)
    return "\n".join(out)


def _inward(line: str, match: re.Match[str], maps: dict[str, tuple[list[str], str]]) -> str:
    used = [maps[name] for name in match[2].split(", ")]
    dims, kinds = used[0][0], match[4].split(", ")
    last = [results.split(", ")[-1] for _, results in used]
    best = max(dims, key=lambda d: (last.count(d), dims.index(d)))
    order = [d for d in dims if d != best] + [best]
    said = ", ".join(f"affine_map<({', '.join(order)}) -> ({results})>" for _, results in used)
    types = ", ".join(kinds[dims.index(d)] for d in order)
    return f"{match[1]}[{said}]{match[3]}[{types}]{line[match.end() :]}"
