"""The CUDA tables without their clocks: every implementation is built and judged, none that is wrong is timed, and one
that fails takes no other with it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from hal import bench
from hal.bench.cuda import attention, block_table, bookkeeping, harness, kv_write, launch, mla, pages
from hal.ops import BUILTIN

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")

Tables = Mapping[str, Callable[[bool], list[bench.Row]]]
KV = {
    "rope_kv_write": set(),
    "kv_write": {"eager", "torch.compile"},
    "mla_kv_write": {"eager", "torch.compile"},
    "mla_rope_kv_write": {"hal rope, then index_put", "eager", "torch.compile"},
    "qk_norm_rope_kv_write": {"rms_norm, then hal rope_kv_write", "eager", "torch.compile"},
    "kv_move": {"hal, workspace for one layer", "eager by layer", "eager, all layers", "torch.compile"},
}
PEERS: dict[str, set[str]] = {
    **KV,
    **{op: set() for op in ("get_last_loc", "assign_extend_cache_locs", *bookkeeping.AROUND_A_BATCH)},
    "build_page_table": {"torch"},
    "build_kv_indices": {"hal, kv_indptr given"},
    "build_kv_indices_from_blocks": {"cumsum and a program a request", "torch"},
    "decode_attention": {"sdpa contiguous"},
    "mla_decode_attention": set(),
    "mla_extend_attention": set(),
}
ROWS = {"kv_write": 4, "assign_extend_cache_locs": 6, "decode_attention": 1}


def test_every_op_has_a_table(tables: Tables) -> None:
    assert {*BUILTIN} <= {*tables}
    assert {*tables} - {*BUILTIN} == {
        *("launcher", "programmatic_launch", "host_calls"),
        *(
            "mla_decode_attention",
            "mla_extend_attention",
            "extend_attention_hopper",
            "decode_by_block_table",
            "hicache",
        ),
    }


def test_hicache(tables: Tables) -> None:
    """Both ways and kinds of slots are judged; one page size where it is quick."""
    rows = tables["hicache"](True)
    assert len(rows) == 2 * 2 * 2 * 3
    assert {tuple(row["wall_gbs"]) for row in rows} == {("hal", "hal, slots on the CPU", "memcpy")}


@pytest.mark.parametrize("table", PEERS)
def test_every_implementation_is_right(tables: Tables, table: str) -> None:
    rows = tables[table](True)
    assert len(rows) == ROWS.get(table, 2)
    for row in rows:
        assert not row.get("failed"), row["failed"]
        assert {bench.OURS} | PEERS[table] == set(row["device_us"])
        if table in KV:
            assert set(row["device_gbs"]) == {*row["device_us"], "copy"}
            moved = {round(row["device_gbs"][n] * us * 1e3) for n, us in row["device_us"].items()}
            assert len(moved) == 1
            assert moved.pop() > 0


@pytest.mark.parametrize("table", ["extend_attention", "extend_attention_hopper"])
def test_extend_is_judged_by_float64(tables: Tables, table: str) -> None:
    rows = tables[table](False)
    ours = {bench.OURS}
    first = ours if table == "extend_attention" else {"hopper", "triton"}
    differ = [ours, ours] if table == "extend_attention" else []
    for row, names in zip(rows, (first, ours, *differ), strict=True):
        assert names <= set(row["device_us"]) <= {*names, "sdpa contiguous"}
        assert all(0 < error <= 1 for error in row["headroom"].values())


def test_decode_over_fp8_is_judged_by_float64(tables: Tables) -> None:
    rows = tables["decode_attention"](False)
    assert [row["cache"] for row in rows] == ["bfloat16", "float8_e4m3fn"]
    assert set(rows[1]["headroom"]) == {bench.OURS}
    assert 0 < rows[1]["headroom"][bench.OURS] <= 1
    assert rows[1]["gbs"] == 2 * 2 * 20 * 16 / rows[1]["device_us"][bench.OURS] / 1e3


class VllmFa3:
    """Stands in for ``vllm.vllm_flash_attn``: over fp8 its queries are fp8, and so are its weights."""

    def __init__(self, off: float = 1.0, ignores: str = "") -> None:
        self.off, self.ignores = off, ignores
        self.planned: list[dict[str, Any]] = []

    def get_scheduler_metadata(self, **about: Any) -> int:
        self.planned.append(about)
        return len(self.planned)

    def flash_attn_varlen_func(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, max_seqlen_q: int, max_seqlen_k: int,
        cu_seqlens_q: torch.Tensor, causal: bool, num_splits: int, seqused_k: torch.Tensor, block_table: torch.Tensor,
        softmax_scale: float, softcap: float, window_size: list[int], out: torch.Tensor, scheduler_metadata: int,
        fa_version: int, **scales: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        assert (fa_version, causal, scheduler_metadata > 0) == (3, True, True)
        planned = self.planned[scheduler_metadata - 1]
        assert q.dtype == k.dtype == planned["qkv_dtype"]
        assert (planned["has_softcap"], planned["window_size"]) == (softcap > 0, window_size)
        assert all(torch.equal(x, torch.ones(2, 1, device="cpu")) for x in scales.values())
        assert sorted(scales) == (["k_descale", "q_descale", "v_descale"] if q.dtype == torch.float8_e4m3fn else [])
        for i, keys in enumerate(seqused_k.tolist()):
            mine = slice(int(cu_seqlens_q[i]), int(cu_seqlens_q[i + 1]))
            k1, v1 = (c.float()[block_table[i].long()].flatten(0, 1)[:keys] for c in (k, v))
            s = torch.einsum("nhd,jgd->nhj", q.float()[mine], k1) * (softmax_scale * self.off)
            if softcap and self.ignores != "cap":
                s = softcap * torch.tanh(s / softcap)
            key, last = torch.arange(keys, device="cpu"), torch.arange(keys - max_seqlen_q, keys, device="cpu")[:, None]
            seen = (key <= last) & (
                key >= last - (keys if window_size[0] < 0 or self.ignores == "window" else window_size[0])
            )
            p = torch.softmax(s.masked_fill(~seen[:, None], -torch.inf), -1)
            out[mine] = torch.einsum("nhj,jgd->nhd", p.to(q.dtype).float(), v1).to(out.dtype)
        return out


def test_vllms_fa3_is_a_peer_over_fp8_judged_by_the_norm(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    module = VllmFa3()
    monkeypatch.setattr("hal.bench.peers.vllm_fa3", lambda: module)
    plain, fp8 = tables["decode_attention"](False)
    assert {"vllm fa3"} <= set(plain["headroom"])
    assert not fp8.get("failed")
    assert set(fp8["device_us"]) == {bench.OURS, "vllm fa3, fp8 queries"}
    assert set(fp8["headroom"]) == {bench.OURS}
    assert [p["num_splits"] for p in module.planned] == [32] * 4
    module.planned.clear()
    rows = tables["extend_attention"](False)
    assert [row["keys"] for row in rows] == [17, 17, "1 x 40, 1 x 9", "1 x 40, 1 x 9"]
    for plain, fp8 in (rows[:2], rows[2:]):
        assert "vllm fa3" in plain["headroom"]
        assert (plain["cache"], fp8["cache"]) == ("bfloat16", "float8_e4m3fn")
        assert set(fp8["device_us"]) == {bench.OURS, "vllm fa3, fp8 queries"}
    assert [p["num_splits"] for p in module.planned] == [32] * 8  # of two requests with up to five tokens each
    module.planned.clear()
    pages.Inputs(2, 17, 20).vllm_fa3()
    assert [p["num_splits"] for p in module.planned] == [1]
    wrong = VllmFa3(1.5)
    monkeypatch.setattr("hal.bench.peers.vllm_fa3", lambda: wrong)
    plain, fp8 = tables["decode_attention"](False)
    assert "outside the bound" in plain["failed"]["vllm fa3"]
    assert "of the norm away" in fp8["failed"]["vllm fa3, fp8 queries"]


def test_models_have_their_windows_and_caps(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of decode and of a prompt, in bf16 and over e4m3, by both; what sees other keys than it should is wrong."""

    def made() -> list[bench.Row]:
        both = (table(False) for table in bench.tables_of_models("cuda").values())
        return [row for pair in zip(*both, strict=True) for row in pair]

    monkeypatch.setattr("hal.bench.peers.vllm_fa3", VllmFa3)
    rows = made()
    assert [(row["model"], row.get("window"), row.get("cap")) for row in rows[:4]] == [
        *[("of windows", 6, None)] * 2,
        *[("of caps", None, 0.5)] * 2,
    ]
    assert [row["cache"] for row in rows] == ["bfloat16"] * 4 + ["float8_e4m3fn"] * 4
    for row in rows:
        assert "failed" not in row
        assert {bench.OURS} < set(row["device_us"])
    # 7 keys a token: of windows 7 and 7 + 4 are read, of caps all
    assert [row["gbs"] * row["device_us"][bench.OURS] for row in rows[:4]] == pytest.approx(
        [2 * 2 * keys * 16 * 2 / 1e3 for keys in (7, 11, 20, 17)]
    )
    for ignores, wrong in (("window", "of windows"), ("cap", "of caps")):
        monkeypatch.setattr("hal.bench.peers.vllm_fa3", lambda ignores=ignores: VllmFa3(ignores=ignores))
        for row in made()[:4]:
            failed = row.get("failed", {}).get("vllm fa3", "")
            assert ("outside the bound" in failed) == (row["model"] == wrong)


class FlashInfer:
    """Stands in for ``flashinfer``, of decode."""

    class BatchDecodeWithPagedKVCacheWrapper:
        def __init__(self, scratch: torch.Tensor, layout: str, **form: Any) -> None:
            assert layout == "NHD"

        def plan(
            self, indptr: torch.Tensor, table: torch.Tensor, last: torch.Tensor, *heads: int, sm_scale: float, **of: Any
        ) -> None:
            self.indptr, self.table, self.last, self.scale = indptr, table, last, sm_scale

        def run(self, q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> torch.Tensor:
            page = caches[0].shape[1]
            for i, last in enumerate(self.last.tolist()):
                pages = self.table[int(self.indptr[i]) : int(self.indptr[i + 1])].long()
                k, v = (c.float()[pages].flatten(0, 1)[: (len(pages) - 1) * page + last] for c in caches)
                p = torch.softmax(torch.einsum("hd,jgd->hj", q[i].float(), k) * self.scale, -1)
                out[i] = torch.einsum("hj,jgd->hd", p, v).to(out.dtype)
            return out


def test_requests_that_differ_are_each_of_their_own_keys(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hal.bench.peers.vllm_fa3", VllmFa3)
    monkeypatch.setattr("hal.bench.peers.flashinfer", lambda: FlashInfer)
    monkeypatch.setattr(attention, "DECODE", ())
    monkeypatch.setattr(attention, "BEYOND", (((2, 1, 16), torch.bfloat16, 4, ((1, 7), (1, 40), (2, 16))),))
    (row,) = tables["decode_attention"](False)
    assert row["keys"] == "1 x 7, 1 x 40, 2 x 16"
    assert "failed" not in row
    assert set(row["headroom"]) == {bench.OURS, "vllm fa3", "flashinfer fa2"}
    assert row["gbs"] == 2 * 79 * 16 * 2 / row["device_us"][bench.OURS] / 1e3


class VllmFa3OfPrompts:
    """The same of keys one behind the other, each query head its own."""

    def __init__(self, off: float = 1.0) -> None:
        self.off = off

    def flash_attn_varlen_func(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, max_seqlen_q: int, max_seqlen_k: int,
        cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, softmax_scale: float, causal: bool, fa_version: int,
    ) -> torch.Tensor:  # fmt: skip
        assert (causal, fa_version) == (True, 3)
        found = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype)
        for i in range(len(cu_seqlens_q) - 1):
            mine, theirs = (slice(*c[i : i + 2].tolist()) for c in (cu_seqlens_q, cu_seqlens_k))
            s = torch.einsum("nhd,jhd->hnj", q.float()[mine], k.float()[theirs]) * (softmax_scale * self.off)
            hidden = torch.ones(max_seqlen_q, max_seqlen_k, dtype=torch.bool).triu(max_seqlen_k - max_seqlen_q + 1)
            p = torch.softmax(s.masked_fill(hidden, -torch.inf), -1)
            found[mine] = torch.einsum("hnj,jhd->nhd", p, v.float()[theirs]).to(q.dtype)
        return found


def test_vllms_fa3_is_a_peer_over_keys_in_order(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = "vllm fa3, contiguous"
    monkeypatch.setattr("hal.bench.peers.vllm_fa3", VllmFa3OfPrompts)
    _, row = tables["extend_attention_hopper"](False)
    assert {bench.OURS, peer} == set(row["headroom"])
    assert row["ratio"] == {peer: row["device_us"][bench.OURS] / row["device_us"][peer]}
    monkeypatch.setattr("hal.bench.peers.vllm_fa3", lambda: VllmFa3OfPrompts(1.5))
    _, row = tables["extend_attention_hopper"](False)
    assert "outside the bound" in row["failed"][peer]


class FlashMla:
    """Stands in for vLLM's ``dense_decode_fwd``, which hands its plan back."""

    def __init__(self, off: float = 1.0) -> None:
        self.off = off

    def __call__(
        self, q: torch.Tensor, rows: torch.Tensor, v_head_dim: int, lens: torch.Tensor, table: torch.Tensor,
        scale: float, causal: bool, plan: torch.Tensor | None, splits: torch.Tensor | None, out: None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        assert causal or q.shape[1] == 1
        found = torch.empty(*q.shape[:3], v_head_dim, dtype=q.dtype)
        for i, keys in enumerate(lens.tolist()):
            k = rows[table[i].long()].flatten(0, 1)[:keys, 0].float()
            s = torch.einsum("thd,jd->htj", q[i].float(), k) * (scale * self.off)
            hidden = torch.ones(q.shape[1], keys, dtype=torch.bool).triu(keys - q.shape[1] + 1)
            p = torch.softmax(s.masked_fill(hidden, -torch.inf), -1)
            found[i] = torch.einsum("htj,jd->thd", p, k[:, :v_head_dim]).to(q.dtype)
        return found, found, lens if plan is None else plan, lens if splits is None else splits


class FlashMlaFp8(FlashMla):
    """The same over fp8 rows, by queries of fp8, which is planned apart."""

    def get_mla_decoding_metadata_dense_fp8(
        self, lens: torch.Tensor, rows: int, heads: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert heads == 1
        return torch.tensor(rows), lens

    def fwd_kvcache_mla_fp8(
        self, q: torch.Tensor, rows: torch.Tensor, v_head_dim: int, lens: torch.Tensor, table: torch.Tensor,
        scale: float, causal: bool, plan: torch.Tensor, splits: torch.Tensor, q_scale: torch.Tensor,
        k_scale: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        assert q.dtype == rows.dtype == torch.float8_e4m3fn
        assert int(plan) == q.shape[1] * q.shape[2]
        assert splits is lens
        assert q_scale.tolist() == k_scale.tolist() == [1.0]
        found, lse, *_ = self(q.bfloat16(), rows.bfloat16(), v_head_dim, lens, table, scale, causal, None, None, None)
        return found, lse


@pytest.mark.parametrize("table", ["mla_decode_attention", "mla_extend_attention"])
def test_what_is_wrong_over_rows_of_mla_is_not_timed(
    tables: Tables, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hal.bench.cuda import mla

    def off(backend: str, op: str) -> Any:
        run = bench.launcher(backend, op)
        return lambda *given, scale: run(*given, scale=1.1 * scale)

    monkeypatch.setattr(mla, "launcher", off)
    for row in tables[table](True):
        assert "request 0: outside the bound" in row["failed"][bench.OURS]
        assert "device_us" not in row


class VllmFa3OfMla:
    """Stands in for ``vllm.vllm_flash_attn`` over MLA's rows: rotated parts as q and k, the others beside them."""

    def __init__(self, off: float = 1.0) -> None:
        self.off = off

    def get_scheduler_metadata(self, **about: Any) -> dict[str, Any]:
        return about

    def flash_attn_varlen_func(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, q_v: torch.Tensor, block_table: torch.Tensor,
        softmax_scale: float, out: torch.Tensor, scheduler_metadata: dict[str, Any], seqused_k: torch.Tensor,
        fa_version: int, **same: Any,
    ) -> torch.Tensor:  # fmt: skip
        assert fa_version == 3
        assert scheduler_metadata.items() >= same.items()
        sizes = [scheduler_metadata[x] for x in ("num_heads_q", "headdim", "headdim_v", "batch_size")]
        assert sizes == [q.shape[1], q.shape[2], q_v.shape[2], len(seqused_k)]
        tokens = same["max_seqlen_q"]
        for i, keys in enumerate(seqused_k.tolist()):
            mine = slice(*same["cu_seqlens_q"][i : i + 2].tolist())
            rotated, latent = (x[block_table[i].long()].flatten(0, 1)[:keys, 0].float() for x in (k, v))
            s = torch.einsum("thd,jd->htj", q[mine].float(), rotated)
            s = (s + torch.einsum("thd,jd->htj", q_v[mine].float(), latent)) * (softmax_scale * self.off)
            hidden = torch.ones(tokens, keys, dtype=torch.bool).triu(keys - tokens + 1)
            p = torch.softmax(s.masked_fill(hidden, -torch.inf), -1)
            out[mine] = torch.einsum("htj,jd->thd", p, latent).to(out.dtype)
        return out


@pytest.mark.parametrize("table", ["mla_decode_attention", "mla_extend_attention"])
@pytest.mark.parametrize(
    ("peer", "library", "made", "wrong"),
    [
        ("vllm fa3", "vllm_fa3", VllmFa3OfMla, lambda: VllmFa3OfMla(1.5)),
        ("vllm flashmla", "flashmla", FlashMla, lambda: FlashMla(1.5)),
        ("vllm flashmla, fp8 queries", "flashmla_fp8", FlashMlaFp8, lambda: FlashMlaFp8(1.5)),
    ],
    ids=["fa3", "flashmla", "flashmla-fp8"],
)
def test_vllms_kernels_are_peers_of_mla(
    tables: Tables, table: str, monkeypatch: pytest.MonkeyPatch, peer: str, library: str, made: Any, wrong: Any
) -> None:
    cache = "float8_e4m3fn" if library == "flashmla_fp8" else "bfloat16"
    monkeypatch.setattr(f"hal.bench.peers.{library}", made)
    row, other = sorted(tables[table](True), key=lambda row: row["cache"] != cache)
    assert row["ratio"] == {peer: row["device_us"][bench.OURS] / row["device_us"][peer]}
    assert not other["ratio"]
    assert all(0 < x["headroom"][bench.OURS] <= 1 for x in (row, other))
    monkeypatch.setattr(f"hal.bench.peers.{library}", wrong)
    row, _ = sorted(tables[table](True), key=lambda row: row["cache"] != cache)
    assert "differs from ours" in row["failed"][peer]


def test_mla_over_requests_that_differ(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hal.bench.peers.vllm_fa3", VllmFa3OfMla)
    monkeypatch.setattr("hal.bench.peers.flashmla", FlashMla)
    rows = [row for row in tables["mla_decode_attention"](False) if row["keys"] != 40]
    assert [(row["cache"], row["heads"], row["keys"]) for row in rows] == [
        (cache, 2, "1 x 70, 1 x 9") for cache in ("bfloat16", "float8_e4m3fn")
    ]
    assert [set(row["ratio"]) for row in rows] == [{"vllm fa3", "vllm flashmla"}, set()]
    assert all(0 < row["headroom"][bench.OURS] <= 1 and not row.get("failed") for row in rows)
    assert rows[0]["least_us"]["bytes"] == 79 * 576 * 2 / mla.COPY


@pytest.mark.parametrize("table", ["get_last_loc", "alloc_decode", "mla_kv_write", "kv_move", "extend_attention"])
def test_what_is_wrong_is_not_timed(tables: Tables, table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that does nothing, one that can't be built, and ours when it is wrong."""
    good = harness.time_row

    def with_bad(about: Any, impls: Any, *args: Any, **more: Any) -> bench.Row:
        def lost() -> Any:
            raise ImportError("no such kernel\nsecond line")

        idle = {"idle": lambda: lambda i: None, "lost": lost}
        wrong = dict.fromkeys([bench.OURS] if ours_is_wrong else [], lambda: lambda i: None)
        return good(about, {**impls, **idle, **wrong}, *args, **more)

    monkeypatch.setattr(harness, "time_row", with_bad)
    monkeypatch.setattr("hal.bench.cuda.attention.time_row", with_bad)
    ours_is_wrong = False
    rows = tables[table](True)
    for row in rows:
        assert set(row["failed"]) == {"idle", "lost"}
        assert row["failed"]["lost"] == "ImportError: no such kernel"
        assert bench.OURS in row["device_us"]
    assert bench.exit_code({"rows": rows}) == 0
    ours_is_wrong = True
    rows = tables[table](True)
    assert all(bench.OURS in r["failed"] and bench.OURS not in r.get("device_us", ()) for r in rows)
    assert bench.exit_code({"rows": rows}) == 1


def test_a_case_or_a_table_that_breaks_stops_no_other(
    tables: Tables, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    whole = kv_write.inputs.cache

    def scarce(row: Any, dtype: torch.dtype, share: int) -> torch.Tensor:
        if dtype == torch.float8_e4m3fn:
            raise RuntimeError("out of memory")
        return whole(row, dtype, share)

    def broken(quick: bool) -> list[bench.Row]:
        raise OSError("lost")

    monkeypatch.setattr(kv_write.inputs, "cache", scarce)
    monkeypatch.setattr(bench, "tables_of", lambda device: {**tables, "mla_kv_write": broken})
    monkeypatch.setattr(bench, "check_backend", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("hal.bench.report.machine", lambda device: {**machine, "device": "Some GPU"})
    assert bench.main(["mla_kv_write", "kv_write"], "cuda", quick=True, save=str(tmp_path)) == 1
    said = capsys.readouterr().out
    assert "kv_write 1 e4m3: hal was not timed: RuntimeError: out of memory" in said
    assert "the table mla_kv_write broke: OSError: lost" in said
    assert "vs eager" in said
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("cuda-mla_kv_write-kv_write-")
    assert [("device_us" in r, r["cache"]) for r in json.loads(file.read_text())["rows"]] == [
        (True, "bf16"),
        (True, "bf16"),
        (False, "e4m3"),
        (False, "e4m3"),
    ]


machine = {"cpu": "x", "cores": 1, "threads": 1, "load": [0.0], "versions": {}, "date": "2026-01-01T00", "commit": ""}


@pytest.mark.usefixtures("tables")
def test_inputs_that_change_nothing_are_refused() -> None:
    a = {
        "kv_lora": torch.zeros(2, 8),
        "k_rope": torch.zeros(2, 8),
        "kv_cache": torch.zeros(4, 16),
        "slots": torch.tensor([1, 2]),
    }
    with pytest.raises(AssertionError, match="nothing would be checked"):
        harness.expect("mla_kv_write", a)


# --- launches ---------------------------------------------------------------------------------------


def test_a_launch_that_is_not_programmatic_does_the_same(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tables["programmatic_launch"](True)
    assert [r["of"] for r in rows] == ["get_last_loc", "assign_extend_cache_locs", "compute_positions", "rope_kv_write"]
    assert all(set(r["device_us"]) == {"hal", "without"} for r in rows)
    out = torch.empty(4, dtype=torch.int64)
    zero = torch.zeros(1, dtype=torch.int64)
    again = launch.without_programmatic(lambda: bench.launcher("cuda", "compute_positions")(zero, zero + 4, out))
    out.fill_(-7)
    again(0)
    assert out.tolist() == [0, 1, 2, 3]


def test_host_calls_are_bound_and_dispatched(tables: Tables) -> None:
    rows = {r["of"]: set(r["host_us"]) for r in tables["host_calls"](True)}
    assert rows["get_last_loc"] == rows["kv_write"] == rows["rope_kv_write"] == {"hal", "dispatched"}
    attention = [names for of, names in rows.items() if of.startswith(("decode", "extend"))]
    assert attention == [{"hal", "dispatched", "out given", "dispatched, out given"}] * 6


def test_what_is_recorded_is_not_started_and_can_be_bound_anew() -> None:
    out = torch.empty(4, dtype=torch.int64)
    zero = torch.zeros(1, dtype=torch.int64)
    fn = bench.launcher("cuda", "compute_positions")
    (one,) = harness.record_launches(lambda: fn(zero, zero + 4, out.fill_(-7)))
    assert out.tolist() == [-7] * 4
    assert one.static["PDL"] is False
    assert one.bind(PDL=True).static["PDL"] is True
    assert any(value is out for value in one.named.values())
    fn(zero, zero + 4, out)
    assert out.tolist() == [0, 1, 2, 3]


# --- block tables -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("bs", "keys"), [(1, 300), (3, 20)])
def test_decode_by_block_table(tables: Tables, bs: int, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Judged by decode_attention itself: one part and several, few requests and many."""
    monkeypatch.setattr(block_table, "BLOCK_SIZES", (bs,))
    monkeypatch.setattr(block_table, "BLOCK_KEYS", (keys,))
    (row,) = tables["decode_by_block_table"](False)
    assert row["step_us"] == {"slots": 32 * 3.0 + 2.0, "blocks, page": 32 * 4.0, "blocks, lane": 32 * 5.0}


def test_a_wrong_variant_is_not_timed(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    good = block_table.decode_by_blocks

    def wrong(*args: Any, by_page: bool, **kw: Any) -> Callable[[], torch.Tensor]:
        call = good(*args, by_page=by_page, **kw)
        return (lambda: call().roll(1, 0)) if by_page else call

    monkeypatch.setattr(block_table, "decode_by_blocks", wrong)
    monkeypatch.setattr(block_table, "BLOCK_SIZES", (2,))
    (row,) = tables["decode_by_block_table"](True)
    assert set(row["failed"]) == {"blocks, page"}
    assert "step_us" not in row
