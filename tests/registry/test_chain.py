"""A chain, ``acme>cpu``: the first where it can, else the next, else an error; in the one grammar, everywhere."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from plugins import Plugins, manifest

import hal
from hal import cli

TABLE = torch.tensor([[7, 8]], dtype=torch.int32)
ZERO, TWO = torch.tensor([0]), torch.tensor([2])


def last(backend: str | None = None, narrow: bool = False) -> int:
    return int(hal.get_last_loc(TABLE, ZERO, TWO.int() if narrow else TWO, backend=backend)[0])


def refuses_narrow(sig: Any) -> str | None:
    return "narrow: i64 alone" if sig["prefix_lens"].dtype == torch.int32 else None


@pytest.fixture
def two(fresh: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`a` refuses int32, `b` takes all; a silent test is one without a warning."""
    monkeypatch.setenv("HAL_PLUGINS", "none")

    def one(req_to_token: Any, req_pool_indices: Any, prefix_lens: Any) -> Any:
        return torch.full_like(prefix_lens, 1)

    def two(req_to_token: Any, req_pool_indices: Any, prefix_lens: Any) -> Any:
        return torch.full_like(prefix_lens, 2)

    hal.register("get_last_loc", backend="a", supports=refuses_narrow)(one)
    hal.register("get_last_loc", backend="b")(two)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("chain", ["a>b", " a > b ", "get_last_loc=a>b", "reference,get_last_loc=a>b", "a>b>reference"])
def test_the_first_that_can(monkeypatch: pytest.MonkeyPatch, chain: str) -> None:
    assert (last(chain), last(chain, narrow=True)) == (1, 2)
    with hal.use(chain):
        assert (last(), last(narrow=True)) == (1, 2)
    hal.configure(backend=chain)
    assert (last(), last(narrow=True)) == (1, 2)
    hal.configure(backend="")
    monkeypatch.setenv("HAL_BACKEND", chain)
    hal.reload()
    assert (last(), last(narrow=True)) == (1, 2)
    like = {"get_last_loc": (TABLE, ZERO, TWO.int())}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ops that the chain is not for
        assert hal.bind("cpu", like=like).get_last_loc(TABLE, ZERO, TWO.int()).tolist() == [2]
        assert hal.bind("cpu").get_last_loc(TABLE, ZERO, TWO).tolist() == [1]
    told = hal.explain("get_last_loc", TABLE, ZERO, TWO.int())
    assert [(v.name, v.state) for v in told.verdicts[:2]] == [("a", "rejected"), ("b", "chosen")]
    assert told.strict


@pytest.mark.usefixtures("two")
def test_strict_at_its_end() -> None:
    hal.register("kv_move", backend="b")(lambda *args: None)
    with pytest.raises(hal.NoBackendError, match=r"a +rejected +narrow[^\0]*chosen by backend='a' \(strict\)"):
        last("a", narrow=True)
    with pytest.raises(hal.NoBackendError) as e:
        hal.rope_kv_write(
            torch.zeros(1, 1, 8), torch.zeros(1, 1, 8), torch.zeros(1, 1, 8), torch.zeros(4, 8), ZERO, backend="a>b"
        )
    lines = str(e.value).splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [["a", "unimplemented"], ["b", "unimplemented"]]
    assert "chosen by backend='a>b' (strict)" in lines[-1]
    with pytest.raises(hal.NoBackendError, match="no backend for rope_kv_write"):
        _ = hal.bind("cpu", backend="a>b").rope_kv_write
    assert last("a>reference", narrow=True) == 8


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("chain", "said"),
    [
        ("a>", "expected BACKEND or OP=BACKEND[/IMPL], separated by commas, or a chain FIRST>NEXT"),
        (">a", "a chain FIRST>NEXT"),
        ("a>>b", "a chain FIRST>NEXT"),
        ("a>auto", "a chain names each backend once, and never auto; got 'a>auto'"),
        ("a>b>a", "a chain names each backend once"),
        ("a>c", "unknown backend c"),
        ("a>referense", "did you mean reference?"),
        ("a>b/x", "b has no implementation b/x"),
        ("get_last_loc>a", "unknown backend get_last_loc"),
    ],
)
def test_what_is_no_chain(chain: str, said: str) -> None:
    with pytest.raises(hal.SelectionError) as e:
        last(chain)
    assert said in str(e.value)


def test_a_backend_that_broke_is_said(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_PLUGINS", "acme,zeta")
    monkeypatch.setenv("HAL_BACKEND", "acme>zeta")
    plugins.add("acme", manifest("acme"), "raise OSError('lost')")
    plugins.add("zeta", manifest("zeta"))
    plugins.load()
    for call in (last, lambda: int(hal.bind("cpu").get_last_loc(TABLE, ZERO, TWO)[0])):
        hal.reload()
        with pytest.warns(hal.FallbackWarning, match="get_last_loc runs on zeta: acme broken: importing .* lost"):
            assert call() == 7
    hal.configure(fallback="error")
    with pytest.raises(hal.NoBackendError, match="HAL_FALLBACK=error forbids going on with zeta"):
        last()


@pytest.mark.usefixtures("two")
def test_conformance_judges_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["hal", "conformance", "a>b"])
    with pytest.raises(SystemExit) as e:
        cli.main()
    assert e.value.code == 2
    assert capsys.readouterr().err == "hal: conformance: 'a>b': expected one backend's name\n"
