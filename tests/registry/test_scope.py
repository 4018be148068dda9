"""`hal.use` where code is paused: generators, async generators, context managers, blocks that end out of order."""

from __future__ import annotations

import asyncio
import contextvars
import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager

import pytest
import torch

import hal

NAMES = ("outer", "inner", "other")


@pytest.fixture(autouse=True)
def backends() -> Iterator[None]:
    for i, name in enumerate(NAMES):
        hal.register("get_last_loc", backend=name)(_of(i))
    yield
    for name in NAMES:
        hal.unregister(name)


def _of(i: int):  # type: ignore[no-untyped-def]
    def get_last_loc(req_to_token, req_pool_indices, prefix_lens):  # type: ignore[no-untyped-def]
        return torch.full_like(prefix_lens, 70 + i)

    return get_last_loc


def who() -> str:
    """Who runs a call here, by the hot path and by `explain`, which must agree."""
    args = torch.tensor([[5, 6]], dtype=torch.int32), torch.tensor([0]), torch.tensor([1])
    code = int(hal.get_last_loc(*args))
    told = hal.explain("get_last_loc", *args).chosen
    assert told is not None
    name = NAMES[code - 70] if code >= 70 else "auto"
    assert (told.name == name) or (name == "auto" and told.name not in NAMES)
    return name


def tokens(name: str, count: int = 3) -> Iterator[str]:
    with hal.use(name):
        for _ in range(count):
            yield who()


def test_a_paused_generator_does_not_decide_its_callers_calls() -> None:
    seen = []
    for inside in tokens("inner"):
        seen.append((inside, who()))
    assert seen == [("inner", "auto")] * 3
    assert who() == "auto"


def test_the_callers_block_holds_around_and_inside_of_a_generators() -> None:
    with hal.use("outer"):
        for inside in tokens("inner"):
            assert (inside, who()) == ("inner", "outer")
            with hal.use("other"):
                assert who() == "other"
        assert who() == "outer"
    assert who() == "auto"


def test_generators_in_turn_end_in_any_order() -> None:
    first, second = tokens("inner", 9), tokens("other", 9)
    assert [next(first), next(second), who(), next(first)] == ["inner", "other", "auto", "inner"]
    first.close()
    assert [next(second), who()] == ["other", "auto"]
    second.close()
    assert who() == "auto"
    with hal.use("outer"):
        third = tokens("inner", 9)
        next(third)
    # It began in a block that has ended.
    assert [who(), next(third), who()] == ["auto", "inner", "auto"]
    third.close()
    assert who() == "auto"


def test_a_generator_that_is_dropped_leaves_nothing_behind() -> None:
    from hal.registry import _scope

    left = tokens("inner")
    next(left)
    del left
    gc.collect()
    assert (who(), _scope.scope.get()) == ("auto", ())


def test_one_that_another_context_ends() -> None:
    left = tokens("inner")
    next(left)
    contextvars.copy_context().run(left.close)
    assert who() == "auto"


def test_a_generator_that_yields_from_another() -> None:
    def around() -> Iterator[str]:
        yield from tokens("inner")

    assert [(inside, who()) for inside in around()] == [("inner", "auto")] * 3


def test_async_generators() -> None:
    async def steps() -> AsyncIterator[str]:
        with hal.use("inner"):
            for _ in range(2):
                await asyncio.sleep(0)
                yield who()

    async def main() -> list[tuple[str, str]]:
        return [(inside, who()) async for inside in steps()]

    assert asyncio.run(main()) == [("inner", "auto")] * 2


def test_a_context_manager_is_for_the_code_in_it() -> None:
    @contextmanager
    def mode() -> Iterator[None]:
        with hal.use("inner"):
            yield

    @contextmanager
    def around() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(mode())
            stack.enter_context(hal.use("other"))
            yield

    @asynccontextmanager
    async def later() -> AsyncIterator[None]:
        with hal.use("inner"):
            yield

    async def main() -> str:
        async with later():
            return who()

    with mode():
        assert who() == "inner"
    with around():
        assert who() == "other"
    assert asyncio.run(main()) == "inner"
    assert who() == "auto"


@pytest.fixture
def inside() -> Iterator[None]:
    with hal.use("inner"):
        yield


def test_a_fixture_is_for_the_test(inside: None) -> None:
    assert who() == "inner"


def test_blocks_that_end_out_of_order() -> None:
    first, second = hal.use("inner"), hal.use("other")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert who() == "other"
    second.__exit__(None, None, None)
    assert who() == "auto"


def test_as_a_decorator_of_functions_that_call_themselves() -> None:
    @hal.use("inner")  # type: ignore[operator, untyped-decorator]
    def again(n: int) -> str:
        return again(n - 1) if n else who()

    assert again(3) == "inner"
    assert who() == "auto"
