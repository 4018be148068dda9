"""The examples in docstrings and in README run, and print what they say."""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import io
import re
from pathlib import Path
from typing import Any

import pytest

import hal
import hal.registry
from hal.ops import BUILTIN, get_spec

ROOT = Path(hal.__file__).parents[1]
README = ROOT / "README.md"
SHOWN = {**{n: getattr(hal, n) for n in hal.__all__ if callable(getattr(hal, n))}, "SlotAllocator": hal.SlotAllocator}
MUST = {*BUILTIN, "KVPool", "SlotAllocator", "bind", "configure", "explain", "register", "torch_ops", "use"}


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("name", sorted(MUST))
def test_example_in_docstring(name: str) -> None:
    doc = get_spec(name).reference.__doc__ if name in BUILTIN else SHOWN[name].__doc__
    # SlotAllocator's `>>> a; b` and KVPool's use torch and hal without a word.
    names = {"torch": __import__("torch"), "hal": hal, "KVPool": hal.KVPool, "SlotAllocator": hal.SlotAllocator}
    test = doctest.DocTestParser().get_doctest(doc or "", names, name, None, None)
    assert test.examples, f"{name} has no example"
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as m:
        m.setenv("HAL_BACKEND", "reference")
        result = doctest.DocTestRunner().run(test, out=out.write)
    assert not result.failed, out.getvalue()


def test_public_things_have_docstrings() -> None:
    for name, thing in SHOWN.items():
        assert thing.__doc__, name
        assert len(thing.__doc__) > 20, name
    for name in hal.registry.__all__:
        thing = getattr(hal.registry, name)
        if callable(thing) and name != "hookimpl":
            assert thing.__doc__, name


def blocks(page: Path) -> list[tuple[str, str | None]]:
    """A page's python blocks, each with the output block right after it, if there is one."""
    found = re.findall(r"^```python\n(.*?)^```\n(?:\n```\n(.*?)^```\n)?", page.read_text(), re.M | re.S)
    return [(code, output or None) for code, output in found]


@pytest.mark.skipif(not README.exists(), reason="no README.md here")
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    "page", ["README.md", "docs/engines.md", "docs/environment.md", "docs/scale.md", "docs/sliding-window.md"]
)
def test_page_runs(page: str) -> None:
    """Blocks marked ``python notest`` need what is not here: an engine, a model."""
    names: dict[str, object] = {}
    outputs = 0
    for code, output in blocks(ROOT / page):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, page, "exec"), names)
        if output is not None:
            outputs += 1
            assert out.getvalue() == output
    assert outputs


@pytest.fixture(scope="module")
def generator() -> Any:
    """ci/docs.py, which writes docs/ops."""
    path = ROOT / "ci" / "docs.py"
    if not path.exists():
        pytest.skip("no ci/docs.py here")
    found = importlib.util.spec_from_file_location("hal_ci_docs", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_generated_pages_are_up_to_date(generator: Any) -> None:
    assert generator.find_drift() == [], "run ci/docs"


def test_drift_is_seen(generator: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of no op, one that is not there, one with another word, README's table."""
    for path, text in generator.files().items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    (tmp_path / "docs/ops/no_such_op.md").write_text("")
    (tmp_path / "docs/ops/kv_write.md").unlink()
    for path in ("docs/ops/get_last_loc.md", "README.md"):
        text = (tmp_path / path).read_text(encoding="utf-8")
        (tmp_path / path).write_text(text.replace("| yes |", "| no |"), encoding="utf-8")
    expected = generator.files()
    monkeypatch.setattr(generator, "files", lambda: expected)
    monkeypatch.setattr(generator, "ROOT", tmp_path)
    assert sorted(generator.find_drift()) == [
        "README.md",
        "docs/ops/get_last_loc.md",
        "docs/ops/kv_write.md",
        "docs/ops/no_such_op.md",
    ]


@pytest.mark.parametrize("op", BUILTIN)
def test_page_tells_the_contract(generator: Any, op: str) -> None:
    """Every argument, every refusal, every backend; links lead somewhere."""
    text = generator.page(op)
    for name in get_spec(op).args:
        assert f"\n| `{name}` |" in text, name
        assert re.search(rf"^- `[\w, ]*{name}[\w, ]*`: ", text, re.M), name
    assert all(f"\n| {e.name} | `{e.argument}: expected" in text for e in get_spec(op).errors)
    for link in re.findall(r"\]\((\.\./[^)]+)\)", text):
        assert (ROOT / "docs/ops" / link).exists(), link


def test_a_name_that_two_classes_have_is_on_the_page_of_names() -> None:
    """Public classes, but those of benches, which only their own module uses."""
    found: dict[str, set[Path]] = {}
    for top in ("hal", "registry", "backends"):
        for path in (ROOT / top).rglob("*.py"):
            if not {"bench", "__pycache__"} & set(path.parts):
                for name in re.findall(r"^class ([A-Za-z]\w*)", path.read_text(), re.M):
                    found.setdefault(name, set()).add(path.resolve())
    twice = (ROOT / "docs" / "names.md").read_text().partition("## Twice")[2]
    assert {name for name, paths in found.items() if len(paths) > 1} == set(re.findall(r"^\| `(\w+)` \|", twice, re.M))
