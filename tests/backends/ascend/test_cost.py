"""What the cost model counts is what the kernels do, and its estimate moves as it must."""

import dataclasses
import json
from importlib import import_module
from typing import Any

import pytest
import torch
import triton.language as tl
from ascend import kernels

from hal import lowered
from hal._errors import HalError
from hal.backends.ascend import hal_backend
from hal.backends.ascend._shapes import cases as inspected
from hal.bench.ascend import model
from hal.bench.ascend.cases import Case, cases
from hal.bench.ascend.count import Counted, counting
from hal.bench.ascend.machine import LAUNCH, MACHINES
from hal.triton import launch

ONE = MACHINES[0]


@launch.jit
def multiply(a, b, out, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    m, k, n = tl.arange(0, M)[:, None], tl.arange(0, K), tl.arange(0, N)[None, :]
    x = tl.load(a + m * K + k[None, :])
    tl.store(out + m * N + n, tl.dot(x, tl.load(b + k[:, None] * N + n)))


@launch.jit
def by_value(src, dst, BLOCK: tl.constexpr):
    total = tl.sum(tl.load(src + tl.arange(0, BLOCK)) * 2, 0)
    for i in range(total):
        tl.store(dst + i, i)


def counted(kernel: Any, grid: tuple[int, ...], *args: Any, **static: Any) -> Counted:
    with counting() as launches:
        kernel(grid, *args, **static)
    (found,) = launches
    return found


def scaled(n: int, programs: int = 1, block: int = 1024) -> Counted:
    src = torch.zeros(block)
    return counted(kernels.scale, (programs,), src, src.clone(), n, 2.0, False, BLOCK=block)


def test_bytes_are_counted_exactly() -> None:
    """A masked load and store of n fp32: as many bytes, in one copy each, by 512-byte lines."""
    work = scaled(300).programs[0]
    for kind in ("in", "out"):
        assert work.copies[kind] == {"copies": 1, "rows": 1, "lines": 3, "bytes": 1200}
    assert sum(work.copied("copies", k) for k in ("in_loop", "out_loop")) == 0
    # Of 16 repeats each: the product, its factor and a zero to negate with filled in, and what the copy leaves out.
    assert (work.units["vector"], work.units["repeat"]) == (4, 64)


def test_twice_the_size_is_twice_the_bytes() -> None:
    assert scaled(1024).bytes == 2 * scaled(512).bytes == 8192
    assert scaled(512, programs=3).bytes == 3 * scaled(512).bytes


@pytest.mark.parametrize(("dtype", "unit", "deep"), [(torch.bfloat16, "cube", 16), (torch.float32, "cube32", 8)])
def test_products_are_counted_exactly(dtype: torch.dtype, unit: str, deep: int) -> None:
    m, k, n = 32, 64, 128
    a, b = torch.zeros(m, k, dtype=dtype), torch.zeros(k, n, dtype=dtype)
    found = counted(multiply, (1,), a, b, torch.zeros(m, n), M=m, K=k, N=n)
    work = found.programs[0]
    assert work.units[unit] == (m // 16) * (k // deep) * (n // 16)
    assert found.mixed
    assert work.copied("bytes", "in") == (m * k + k * n) * a.element_size()
    # Both operands go straight to the cube core; the product is handed over, written and read.
    assert (work.units["exchange"], work.units["exchanged"]) == (1, 2 * m * n * 4)


@pytest.mark.parametrize("op", hal_backend().ops)
def test_counts_are_those_of_the_run(op: str) -> None:
    """The first inspected case of every op, counted, against every access of the same call, made and traced."""
    case = next(c for c in inspected() if c.op == op and ("attention" not in op or c.name.startswith("smollm2")))
    args = case.make()
    function = getattr(import_module(f"hal.backends.ascend.{op}"), op)
    with counting() as found:
        function(**args)
    with lowered.recording() as made:
        function(**args)
    assert len(found) == len(made) > 0
    for ours, real in zip(found, made, strict=True):
        traffic = real.traffic.values()
        reads = sum(p.units["hit"] + p.units["miss"] for p in ours.programs)
        assert reads == sum(t.scalar_reads for t in traffic)
        copies = sum(p.copied("copies") for p in ours.programs)
        assert copies == sum(t.copies_in + t.copies_out for t in traffic)
        size = max(t.element_size() for t in args.values() if isinstance(t, torch.Tensor))
        moved = sum(t.bytes_read + t.bytes_written for t in traffic)
        assert 0 <= moved - sum(p.copied("bytes") for p in ours.programs) <= size * reads


def test_fewer_cores_take_longer() -> None:
    found = scaled(1024, programs=40)
    times = [model.seconds(found, dataclasses.replace(ONE, vector_cores=n)) for n in (40, 20, 10)]
    assert [cores for _, cores, _ in times] == [40, 20, 10]
    work = [t - LAUNCH for t, _, _ in times]
    # The clock is derived from cube cores alone: twice the programs a core, twice the time.
    assert work[1] == pytest.approx(2 * work[0])
    assert work[2] == pytest.approx(4 * work[0])


def test_memory_bounds_what_cores_do_not() -> None:
    found = scaled(1024, programs=40)
    time, _, bound = model.seconds(found, dataclasses.replace(ONE, bandwidth=1e9))
    assert time == pytest.approx(LAUNCH + 40 * 8192 / 1e9)
    assert bound == "memory"


def test_what_hangs_on_a_tensors_values_is_refused() -> None:
    with pytest.raises(HalError, match="hangs on values of a tensor"):
        counted(by_value, (1,), torch.ones(16, dtype=torch.int32), torch.zeros(64, dtype=torch.int32), BLOCK=16)


def test_every_op_has_a_row_on_both_machines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the shapes the names, and of each op one that is small: real models' take a minute."""
    assert {c.op for c in cases()} == set(hal_backend().ops)
    first = {c.op: Case(c.op, c.name, c.make, c.needed) for c in reversed(list(inspected()))}
    monkeypatch.setattr(model, "cases", lambda: iter(first.values()))
    assert model.main((), True) == 0
    run = json.loads(capsys.readouterr().out)
    assert run["estimate"] is True
    assert run["assumptions"]
    seen = {(r["op"], r["machine"]) for r in run["rows"]}
    assert seen == {(op, machine.name) for op in hal_backend().ops for machine in MACHINES}
    for row in run["rows"]:
        assert row["estimate_us"] > row["floor_us"] >= 0, row
        assert row["cores"] <= 48
    assert model.main(("get_last_loc",)) == 0
    text = capsys.readouterr().out
    assert text.startswith("ESTIMATE")
    assert text.count("assumed:") == len(run["assumptions"])
    with pytest.raises(HalError, match="no op 'nothing'"):
        model.main(("nothing",))
