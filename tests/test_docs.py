"""The examples in docstrings and in README run, and print what they say."""

from __future__ import annotations

import contextlib
import doctest
import io
import re
from pathlib import Path

import pytest

import hal
import hal.registry
from hal.ops import BUILTIN, spec

ROOT = Path(hal.__file__).parents[1]
README = ROOT / "README.md"
SHOWN = {
    **{n: getattr(hal, n) for n in hal.__all__ if callable(getattr(hal, n))},
    "SlotAllocator": hal.SlotAllocator,
}
MUST = {*BUILTIN, "KVPool", "SlotAllocator", "bind", "configure", "explain", "register", "use"}


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("name", sorted(MUST))
def test_example_in_docstring(name: str) -> None:
    doc = spec(name).reference.__doc__ if name in BUILTIN else SHOWN[name].__doc__
    # SlotAllocator's `>>> a; b` and KVPool's use torch and hal without a word.
    names = {
        "torch": __import__("torch"),
        "hal": hal,
        "KVPool": hal.KVPool,
        "SlotAllocator": hal.SlotAllocator,
    }
    test = doctest.DocTestParser().get_doctest(doc or "", names, name, None, None)
    assert test.examples, f"{name} has no example"
    told = io.StringIO()
    with pytest.MonkeyPatch.context() as m:
        m.setenv("HAL_BACKEND", "reference")
        result = doctest.DocTestRunner().run(test, out=told.write)
    assert not result.failed, told.getvalue()


def test_public_things_have_docstrings() -> None:
    for name, thing in SHOWN.items():
        assert thing.__doc__, name
        assert len(thing.__doc__) > 20, name
    for name in hal.registry.__all__:
        thing = getattr(hal.registry, name)
        if callable(thing) and name != "hookimpl":
            assert thing.__doc__, name


def blocks() -> list[tuple[str, str | None]]:
    """README's python blocks, each with the output block right after it, if there is one."""
    if not README.exists():
        return []
    found = re.findall(r"^```python\n(.*?)^```\n(?:\n```\n(.*?)^```\n)?", README.read_text(), re.M | re.S)
    return [(code, output or None) for code, output in found]


@pytest.mark.skipif(not README.exists(), reason="no README.md here")
@pytest.mark.usefixtures("fresh")
def test_readme_runs() -> None:
    names: dict[str, object] = {}
    outputs = 0
    for code, output in blocks():
        told = io.StringIO()
        with contextlib.redirect_stdout(told):
            exec(compile(code, "README.md", "exec"), names)
        if output is not None:
            outputs += 1
            assert told.getvalue() == output
    assert outputs
