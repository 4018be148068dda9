"""SGLang's kernel names on hal's ops, against plain torch. Runs without SGLang."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hal.engines import EngineError
from hal.engines.sglang import kernels
from hal.engines.sglang.kernels import _addresses
from hal.engines.sglang.kernels.__main__ import main

SLOTS, LAYERS, HEADS, DIM, PAGE = 24, 3, 2, 8, 4
SRC, DST = torch.tensor([5, 0, 17, -1, 99, 9]), torch.tensor([1, 20, 3, 4, 5, -1])
COPIED = [(5, 1), (0, 20), (17, 3)]
"""The pairs of SRC and DST that are in range."""


@pytest.fixture(autouse=True)
def seeded(fresh: None) -> None:
    torch.manual_seed(0)


def layers() -> list[torch.Tensor]:
    return [torch.randn(SLOTS, HEADS, DIM) for _ in range(LAYERS)]


ITEM = HEADS * DIM * 4


# --- transfer ---------------------------------------------------------------------------------------


def check(src: Any, dst: Any, was: Any, pairs: list[tuple[int, int]] = COPIED) -> None:
    """dst, ``[slots, ...]``, is `was` but for the pairs."""
    want = was.clone()
    for a, b in pairs:
        want[b] = src[a]
    assert torch.equal(dst, want)


def test_per_layer_and_all_layers() -> None:
    k, v, k_dst, v_dst = layers(), layers(), layers(), layers()
    was = [t.clone() for t in k_dst + v_dst]
    kernels.transfer_kv_per_layer(k[0], k_dst[0], v[0], v_dst[0], SRC, DST, ITEM)
    check(k[0], k_dst[0], was[0])
    check(v[0], v_dst[0], was[LAYERS])
    check(k[1], k_dst[1], was[1], [])
    kernels.transfer_kv_all_layer(k, k_dst, v, v_dst, SRC, DST, ITEM, LAYERS)
    for i in range(LAYERS):
        check(k[i], k_dst[i], was[i])
        check(v[i], v_dst[i], was[LAYERS + i])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_page_first_and_back(dtype: torch.dtype) -> None:
    k, v = ([t.to(dtype) for t in layers()] for _ in range(2))
    item = ITEM // 4 * dtype.itemsize
    pages = [torch.zeros(SLOTS, LAYERS, HEADS, DIM, dtype=dtype) for _ in range(2)]
    kernels.transfer_kv_all_layer_lf_pf(k, pages[0], v, pages[1], SRC, DST, item, LAYERS * item, LAYERS)
    for i in range(LAYERS):
        check(k[i], pages[0][:, i], torch.zeros_like(k[i]))
        check(v[i], pages[1][:, i], torch.zeros_like(k[i]))
    k_dst, v_dst = torch.zeros_like(k[1]), torch.zeros_like(k[1])
    kernels.transfer_kv_per_layer_pf_lf(pages[0], k_dst, pages[1], v_dst, DST, SRC, 1, item, LAYERS * item)
    back = [(a, a) for a, _ in COPIED]
    check(k[1], k_dst, torch.zeros_like(k[1]), back)
    check(v[1], v_dst, torch.zeros_like(k[1]), back)


def test_page_head_and_back() -> None:
    k, v = layers(), layers()
    pages = [torch.zeros(SLOTS // PAGE, HEADS, PAGE, LAYERS, DIM) for _ in range(2)]
    kernels.transfer_kv_all_layer_lf_ph(k, pages[0], v, pages[1], SRC, DST, ITEM, LAYERS * ITEM, LAYERS, PAGE, HEADS)
    for i in range(LAYERS):
        for given, made in ((k, pages[0]), (v, pages[1])):
            check(given[i], made[:, :, :, i].transpose(1, 2).reshape(SLOTS, HEADS, DIM), torch.zeros(SLOTS, HEADS, DIM))
    k_dst, v_dst = torch.zeros(2, SLOTS, HEADS, DIM)
    kernels.transfer_kv_per_layer_ph_lf(pages[0], k_dst, pages[1], v_dst, DST, SRC, 2, ITEM, LAYERS * ITEM, PAGE, HEADS)
    check(k[2], k_dst, torch.zeros_like(k_dst), [(a, a) for a, _ in COPIED])
    check(v[2], v_dst, torch.zeros_like(k_dst), [(a, a) for a, _ in COPIED])


def test_latent_rows() -> None:
    rows = [torch.randn(SLOTS, 1, 12) for _ in range(LAYERS)]
    dst, pages = [torch.zeros(SLOTS, 1, 12) for _ in rows], torch.zeros(SLOTS, LAYERS, 1, 12)
    kernels.transfer_kv_all_layer_mla(rows, dst, SRC, DST, 48, LAYERS)
    kernels.transfer_kv_all_layer_mla_lf_pf(rows, pages, SRC, DST, 48, LAYERS * 48, LAYERS)
    for i in range(LAYERS):
        check(rows[i], dst[i], torch.zeros_like(dst[i]))
        check(rows[i], pages[:, i], torch.zeros_like(dst[i]))
    one = torch.zeros(SLOTS, 1, 12)
    kernels.transfer_kv_per_layer_mla_pf_lf(pages, one, DST, SRC, 2, 48, LAYERS * 48)
    check(rows[2], one, torch.zeros_like(one), [(a, a) for a, _ in COPIED])
    one.zero_()
    kernels.transfer_kv_per_layer_mla(rows[0], one, SRC, DST, 48)
    check(rows[0], one, torch.zeros_like(one))


def test_direct() -> None:
    k, v = layers(), [torch.randn(SLOTS, HEADS, 2 * DIM) for _ in range(LAYERS)]
    dst = [torch.zeros_like(t) for t in k + v]
    kernels.transfer_kv_direct(k + v, dst, SRC, DST, page_size=1)
    for a, b in zip(k + v, dst, strict=True):
        check(a, b, torch.zeros_like(b))
    pages = [torch.zeros(SLOTS // PAGE, LAYERS, PAGE, HEADS, n) for n in (DIM, 2 * DIM)]
    src, at = torch.arange(4, 12), torch.arange(12, 20)
    kernels.transfer_kv_all_layer_direct_lf_pf(k + v, pages, src, at, PAGE)
    for i in range(LAYERS):
        for given, made in ((k, pages[0]), (v, pages[1])):
            check(
                given[i],
                made[:, i].reshape(SLOTS, HEADS, -1),
                torch.zeros_like(given[i]),
                list(zip(src.tolist(), at.tolist(), strict=True)),
            )
    back = [torch.zeros_like(k[1]), torch.zeros_like(v[1])]
    kernels.transfer_kv_per_layer_direct_pf_lf(pages, back, at, src, 1, PAGE)
    assert torch.equal(back[0][src], k[1][src])
    assert torch.equal(back[1][src], v[1][src])
    assert back[0].count_nonzero() == k[1][src].count_nonzero()


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table: layers end where the next one begins, the last where its allocation does."""
    src, dst = torch.randn(2, LAYERS, SLOTS, HEADS, DIM).unbind()
    tables = [torch.tensor([t.data_ptr() for t in list(p)[::-1]], dtype=torch.uint64) for p in (src, dst)]
    store, asked = src.untyped_storage(), []

    def known(addresses: list[int]) -> list[Any]:
        asked.append(addresses)
        return [(store.data_ptr(), store.data_ptr() + store.nbytes(), "cpu") for _ in addresses]

    monkeypatch.setattr(_addresses, "allocations", known)
    (rows,) = {len(t) for t in _addresses.layers_at("f", tables[1], ITEM, LAYERS)}
    assert rows == SLOTS * ITEM
    was = dst.clone()
    for _ in range(2):
        kernels.transfer_kv_all_layer_mla(*tables, SRC, DST, ITEM, LAYERS)
    for i in range(LAYERS):
        check(src[i], dst[i], was[i])
    assert len(asked) == 2, "a table is read once"
    tables[0][0] = tables[0][1]
    kernels.transfer_kv_all_layer_mla(*tables, SRC, DST, ITEM, LAYERS)
    assert len(asked) == 3, "but for one that has been written"
    pages = torch.zeros(SLOTS, LAYERS, HEADS, DIM)
    at = torch.arange(SLOTS)
    kernels.transfer_kv_all_layer_mla_lf_pf(tables[1], pages, at, at, ITEM, ITEM * LAYERS, LAYERS)
    assert torch.equal(pages, dst.flip(0).transpose(0, 1))


def test_parts_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """HiCache's JIT names: the first elements of rows that are longer, by layers and by tables of addresses."""
    src, dst = torch.randn(2, 2, LAYERS, SLOTS, 16).unbind()
    was, part, stride = dst.clone(), slice(12), 16 * 4
    views = [t[0][..., part] for t in (dst[0], dst[1], src[0], src[1])]
    kernels.transfer_hicache_one_layer(*views[:2], DST, *views[2:], SRC, block_quota=1)
    for half in range(2):
        check(src[half, 0, :, part], dst[half, 0, :, part], was[half, 0, :, part])
    assert torch.equal(dst[..., 12:], was[..., 12:])
    tables = [torch.tensor([t.data_ptr() for t in half], dtype=torch.uint64) for half in (*dst, *src)]
    store = src.untyped_storage()
    known = lambda addresses: [(store.data_ptr(), store.data_ptr() + store.nbytes(), "cpu") for _ in addresses]  # noqa: E731
    monkeypatch.setattr(_addresses, "allocations", known)
    strides = {f"kv_cache_{side}_stride_bytes": stride for side in ("src", "dst")}
    kernels.transfer_hicache_all_layer(*tables[:2], DST, *tables[2:], SRC, **strides, element_size=12 * 4)
    for half in range(2):
        for i in range(LAYERS):
            check(src[half, i, :, part], dst[half, i, :, part], was[half, i, :, part])
    assert torch.equal(dst[..., 12:], was[..., 12:])


def test_addresses_are_refused() -> None:
    table = torch.tensor([1, 2, 3], dtype=torch.uint64)
    with pytest.raises(kernels.Unsupported, match=r"address 0x1 of a table: no allocator .* pass the layers") as e:
        kernels.transfer_kv_all_layer(table, layers(), table, layers(), SRC, DST, ITEM, LAYERS)
    assert isinstance(e.value, EngineError)
    assert isinstance(e.value, NotImplementedError)
    with pytest.raises(kernels.Unsupported, match="addresses"):
        kernels.write_req_to_token_pool_triton(table)


# --- in SGLang's modules ----------------------------------------------------------------------------


def test_names_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Modules of hal's functions by another's names, and hal's functions over another's."""
    (tmp_path / "testing.py").write_text("from taken_kernel import get_last_loc\n")
    (tmp_path / "theirs.py").write_text("from os import fspath as merge_state\ndef get_last_loc(): ...\n")
    (tmp_path / "program.py").write_text(
        "import sys, theirs, taken_kernel.testing, taken.below.io\n"
        "from hal.engines.sglang import kernels\n"
        "assert taken_kernel.testing.get_last_loc is theirs.get_last_loc is kernels.get_last_loc\n"
        "assert taken.below.io.transfer_kv_direct is kernels.transfer_kv_direct\n"
        "assert theirs.merge_state is not kernels.merge_state, 'it did not define that'\n"
        "print(sys.argv[1:])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.setattr(sys, "argv", [])
    arguments = ["--as", "taken_kernel,taken.below.io", "--path", str(tmp_path), "--over", "theirs"]
    assert main([*arguments, "program", "-q"]) == 0
    assert capsys.readouterr() == ("['-q']\n", "hal: theirs: get_last_loc\n")
    for flag, name, why in (
        ("--as", "taken_kernel", "has been imported"),
        ("--over", "nowhere", "No module named"),
        ("--over", "json", "defines no function"),
    ):
        assert main([flag, name, "program"]) == 2
        assert why in capsys.readouterr().err


# --- slots ------------------------------------------------------------------------------------------


def test_slots() -> None:
    table = torch.arange(40, dtype=torch.int32).view(4, 10) + 100
    rows, starts, ends = torch.tensor([2, 0, 3]), torch.tensor([1, 0, 4]), torch.tensor([4, 0, 6])
    assert kernels.get_last_loc(table, rows, starts).tolist() == [120, -1, 133]
    out = torch.empty(5, dtype=torch.int64)
    kernels.assign_extend_cache_locs[(3,)](rows, table, starts, ends, out, table.shape[1], 4)
    want = torch.cat([table[r, s:e] for r, s, e in zip(rows, starts, ends, strict=True)])
    assert out.tolist() == want.tolist()
    uniform = kernels.assign_extend_cache_locs_func(
        req_pool_indices=rows,
        req_to_token=table,
        start_offset=starts,
        end_offset=starts + 2,
        batch_size=3,
        draft_token_num=2,
        device="cpu",
    )
    assert uniform.tolist() == [121, 122, 100, 101, 134, 135]
    lens = ends - starts
    indptr = torch.tensor([0, 3, 3, 5, 77], dtype=torch.int32)
    indices = torch.full((9,), -7, dtype=torch.int32)
    kernels.create_flashinfer_kv_indices_triton[(3,)](table, rows, lens, indptr, starts, indices, table.stride(0))
    assert indices.tolist() == [*want.tolist(), -7, -7, -7, -7]
    assert indptr.tolist() == [0, 3, 3, 5, 77]
    for changed in ({"ENTRY_PAGE_SIZE": 4}, {"token_mapping": table}):
        with pytest.raises(kernels.Unsupported, match=next(iter(changed))):
            kernels.create_flashinfer_kv_indices(table, rows, lens, indptr, None, indices, 10, **changed)


def test_allocation() -> None:
    free, out = torch.tensor([7, 3, 9]), torch.empty(9, dtype=torch.int64)
    kernels.alloc_extend_kernel[(2,)](
        torch.tensor([2, 0]), torch.tensor([6, 5]), torch.tensor([21, -1]), free, out, 2, PAGE
    )
    assert out.tolist() == [22, 23, 28, 29, 12, 13, 14, 15, 36]
    one = torch.empty(2, dtype=torch.int64)
    kernels.alloc_decode_kernel[(2,)](torch.tensor([5, 7]), torch.tensor([3, 45]), free, one, 2, PAGE)
    assert one.tolist() == [28, 46]


# --- writes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("skipped", "written"), [(0, [5]), (-1, [5, 0])])
def test_store_cache(skipped: int, written: list[int]) -> None:
    k, v, slots = torch.randn(4, 16), torch.randn(4, 24), torch.tensor([5, 0, 30, -1])
    k_cache, v_cache = torch.zeros(SLOTS, 16), torch.zeros(SLOTS, 24)
    kernels.store_cache(k, v, k_cache, v_cache, slots, reserved_skip_index=skipped)
    pairs = [(i, s) for i, s in enumerate(slots.tolist()) if s in written]
    check(k, k_cache, torch.zeros_like(k_cache), pairs)
    check(v, v_cache, torch.zeros_like(v_cache), pairs)
    kernels.store_cache(k, v, k_cache, v_cache, torch.full((4,), 20), size_limit=20)
    assert not k_cache[20].any()
    with pytest.raises(kernels.Unsupported, match="reserved_skip_index 3"):
        kernels.store_cache(k, v, k_cache, v_cache, slots, reserved_skip_index=3)


@pytest.mark.parametrize("function", ["set_mla_kv_buffer", "set_mla_kv_buffer_triton"])
def test_set_mla_kv_buffer(function: str) -> None:
    nope, rope, cache = torch.randn(3, 1, 8), torch.randn(3, 1, 4), torch.zeros(SLOTS, 1, 12)
    getattr(kernels, function)(cache, torch.tensor([4, 0, 99]), nope, rope)
    check(torch.cat([nope, rope], -1), cache, torch.zeros_like(cache), [(0, 4)])
    getattr(kernels, function)(cache, torch.empty(0, dtype=torch.int64), nope[:0], rope[:0])
    check(torch.cat([nope, rope], -1), cache, torch.zeros_like(cache), [(0, 4)])


def test_set_mla_kv_buffer_of_bytes() -> None:
    """All 256 of them, in rows of a layout that hal does not know."""
    rows, cache = torch.arange(256, dtype=torch.uint8).view(4, 1, 64), torch.zeros(SLOTS, 1, 64, dtype=torch.uint8)
    kernels.set_mla_kv_buffer(cache, torch.tensor([3, 1, 2, 7]), rows[..., :48], rows[..., 48:])
    check(rows, cache, torch.zeros_like(cache), list(enumerate([3, 1, 2, 7])))


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("signature", ["aot", "jit", "apart"])
def test_rope(neox: bool, signature: str) -> None:
    n, heads, kv_heads, dim = 5, 4, 2, 16
    q, k, v = torch.randn(n, heads * dim), torch.randn(n, kv_heads * dim), torch.randn(n, kv_heads * dim)
    angle = torch.outer(torch.arange(32.0), 100 ** (-torch.arange(0, dim, 2) / dim))
    table, positions = torch.cat([angle.cos(), angle.sin()], -1), torch.tensor([0, 3, 31, 7, 7])
    slots = torch.tensor([3, -1, 8, 1, 30])

    def rotated(x: torch.Tensor) -> torch.Tensor:
        pairs = x.view(n, -1, dim)
        a, b = pairs.chunk(2, -1) if neox else (pairs[..., ::2], pairs[..., 1::2])
        cos, sin = angle.cos()[positions][:, None], angle.sin()[positions][:, None]
        turned = a * cos - b * sin, b * cos + a * sin
        return torch.cat(turned, -1) if neox else torch.stack(turned, -1).flatten(-2)

    want = rotated(q), rotated(k)
    k_cache, v_cache = torch.zeros(2, SLOTS, kv_heads * dim)
    fused = kernels.FusedSetKVBufferArg(v, k_cache, v_cache, slots)
    if signature == "aot":
        kernels.apply_rope_with_cos_sin_cache_inplace(positions, q, k, dim, table, neox, fused_set_kv_buffer_arg=fused)
    else:
        by_head = q.view(n, heads, dim), k.view(n, kv_heads, dim)
        if signature == "jit":
            kernels.apply_rope_with_cos_sin_cache_inplace(*by_head, table, positions, is_neox=neox, fused_args=fused)
        else:
            kernels.apply_rope_inplace_with_kvcache(
                *by_head, v, k_cache, v_cache, table, positions, slots, is_neox=neox
            )
    torch.testing.assert_close(q.view(n, heads, dim), want[0])
    torch.testing.assert_close(k.view(n, kv_heads, dim), want[1])
    pairs = [(0, 3), (2, 8), (3, 1)]
    check(k, k_cache, torch.zeros_like(k_cache), pairs)
    check(v, v_cache, torch.zeros_like(v_cache), pairs)
    again = q.clone(), k.clone()
    kernels.apply_rope_with_cos_sin_cache_inplace(positions, q, k, dim, table, neox)
    assert not torch.equal(q, again[0])
    kernels.apply_rope_inplace(*(t.view(n, -1, dim) for t in again), table, positions, is_neox=neox)
    assert torch.equal(q, again[0])
    assert torch.equal(k, again[1])


# --- SGLang's own -----------------------------------------------------------------------------------


def test_every_name_is_there() -> None:
    assert all(callable(getattr(kernels, name)) for name in kernels.OPS.values())
    assert set(kernels.OPS.values()) < set(kernels.__all__)
    assert all(hasattr(kernels, name) for name in kernels.__all__)


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed here")
def test_sglangs_registry_and_signatures() -> None:
    code = """
import inspect
from hal.engines import EngineError
from hal.engines.sglang import kernels, vision
vision.declare_operators()
from sglang.kernels.selector import select_kernel
from sglang.kernels.spec import KernelBackend
from sglang.kernels.registry import registry
import sglang.kernels
before = {op: registry.get(op) for op in kernels.OPS}
if hasattr(KernelBackend, "PLUGIN"):
    kernels.register()
    kernels.register()
    for op, name in kernels.OPS.items():
        assert select_kernel(op, KernelBackend.PLUGIN).load() is getattr(kernels, name), op
        assert registry.get(op)[: len(before[op])] == before[op], op
else:
    try:
        kernels.register()
        raise AssertionError("registered")
    except EngineError as e:
        assert "no place for others' kernels" in str(e)
from sglang.kernels.ops.attention import decode_attention, extend_attention
from sglang.kernels.ops.kvcache import kvcache, set_mla_kv_buffer
for theirs, ours in (
    (decode_attention.decode_attention_fwd, kernels.decode_attention_fwd),
    (extend_attention.extend_attention_fwd, kernels.extend_attention_fwd),
    (extend_attention.extend_attention_fwd_unified, kernels.extend_attention_fwd_unified),
    (kvcache.store_cache, kernels.store_cache),
    (set_mla_kv_buffer.set_mla_kv_buffer, kernels.set_mla_kv_buffer),
):
    schema = getattr(getattr(theirs, "default", None), "_schema", None)  # an operator in 0.5.17
    takes = [a.name for a in schema.arguments] if schema else list(inspect.signature(theirs).parameters)
    has = [p.name for p in inspect.signature(ours).parameters.values() if p.name != "tuning"]
    # What 0.5.17 has not yet is by keyword.
    has = [n for n in has if n in takes or n != "reserved_skip_index"]
    assert takes[: len(has)] == has, theirs
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert not ran.returncode, ran.stderr[-3000:]
    assert inspect.isfunction(kernels.register)
