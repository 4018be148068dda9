"""The engine on a small Llama with random weights: whatever happens to a request, its tokens are transformers' own."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

import hal

pytest.importorskip("transformers", reason="needs the extra `demo`")

from demo_llama import (
    CPU,
    SYSTEM,
    assert_nothing_held,
    assert_same_tokens,
    engine,
    happened,
    prompts,
    transformers_llama,
)
from transformers import LlamaConfig, LlamaForCausalLM

from hal.demo.cache import PagedCache
from hal.demo.check import compare
from hal.demo.engine import OPS, Engine
from hal.demo.meter import Meter
from hal.demo.model import Batch, Llama

pytestmark = pytest.mark.filterwarnings("ignore::hal.FallbackWarning")


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("tied", [True, False])
def test_tokens_are_transformers_own(page_size: int, tied: bool) -> None:
    e = engine(slots=240, page_size=page_size, tied=tied)
    requests = [e.add(p, 20) for p in prompts(5)]
    e.run()
    assert_same_tokens(requests, tied)
    assert_nothing_held(e)


def test_a_request_ends_with_an_end_token() -> None:
    e = engine()
    whole = e.add(prompts(1)[0], 20)
    e.run()
    end = whole.output[7]
    theirs = transformers_llama(eos=end)
    e.model.eos = frozenset([end])
    cut = e.add(prompts(1)[0], 20)
    e.run()
    assert cut.output == whole.output[: whole.output.index(end) + 1]
    assert compare(theirs, cut).equal
    assert_nothing_held(e)


def test_the_system_prompt_is_computed_once() -> None:
    e = engine(page_size=4)
    computed: list[int] = []
    forward = e.model.forward

    def counting(batch: Batch, pool: Any) -> torch.Tensor:
        computed.append(len(batch.tokens))
        return forward(batch, pool)

    e.model.forward = counting  # type: ignore[method-assign]
    requests = [e.add(p, 4) for p in prompts(3)]
    e.step()
    whole = len(SYSTEM) // 4 * 4
    assert happened(e, "started") == [(0, 0), (1, whole), (2, whole)]
    assert computed == [sum(len(r.prompt) for r in requests) - 2 * whole]
    tables = [e.cache.req_to_token[r.row, :whole].tolist() for r in requests]
    assert tables[0] == tables[1] == tables[2]
    e.run()
    assert_same_tokens(requests)


def test_a_shared_page_outlives_who_wrote_it() -> None:
    e = engine(running=2, page_size=4)
    short, long = e.add(prompts(2)[0], 2), e.add(prompts(2)[1], 20)
    while not short.done:
        e.step()
    late = e.add(prompts(3)[2], 20)
    e.run()
    assert happened(e, "started")[2] == (2, len(SYSTEM) // 4 * 4)
    assert_same_tokens([short, long, late])
    assert_nothing_held(e)


def test_pages_never_chain_onto_pages_of_others() -> None:
    """Two equal prompts of whole pages: the second computes its last page itself, beside the first's.

    Were it published behind the first's, it would be found once that page holds other tokens.
    """
    same = SYSTEM[:12]
    e = engine(slots=48, running=2, page_size=4)
    first, second = e.add(same, 2), e.add(same, 24)
    e.step()
    assert e.cache._page_of.keys() == {e.cache._prefix_of[p] for p in e.cache._prefix_of}
    held = {int(s) // 4 for s in e.cache.req_to_token[second.row][:12]}
    # A published page that follows another is held by whoever holds that one.
    for page, (before, _) in e.cache._prefix_of.items():
        assert before == -1 or page not in held or before in held
    other = e.add([99] * 4 + same[4:], 8)
    e.run()
    assert_same_tokens([first, second, other])
    assert_nothing_held(e)


def test_a_prompt_that_is_all_in_the_cache_still_has_its_last_page_computed() -> None:
    e = engine(running=2, page_size=4)
    first = e.add(SYSTEM[:12], 12)
    e.step()
    again = e.add(SYSTEM[:12], 12)
    e.run()
    assert happened(e, "started") == [(0, 0), (1, 8)]
    assert again.output == first.output
    assert_same_tokens([first, again])
    assert_nothing_held(e)


def test_an_urgent_request_takes_the_place_of_the_last() -> None:
    e = engine(slots=120, running=3)
    requests = [e.add(p, 20) for p in prompts(4)]
    for _ in range(6):
        e.step()
    requests.append(e.add([*SYSTEM, 7, 8, 9], 20, priority=1))
    e.run()
    moved = len(requests[2].prompt) + 5
    assert happened(e, "to the host") == [(2, moved)]
    assert happened(e, "back") == [(2, moved - len(SYSTEM) // 4 * 4)]
    order = [event.request.number for event in e.events if event.what in ("started", "back")]
    assert order == [0, 1, 2, 4, 2, 3]
    assert_same_tokens(requests)
    assert_nothing_held(e)


class Forgets(Meter):
    """Moves nothing."""

    def kv_transfer(self, *args: Any, **kwargs: Any) -> None:
        pass


class Misses(Meter):
    """Moves each slot's neighbour. (A mere permutation of rows would not show: attention has no order but RoPE's.)"""

    def kv_transfer(self, src: Any, dst: Any, src_slots: torch.Tensor, dst_slots: torch.Tensor) -> None:
        hal.kv_transfer(src, dst, src_slots + 1, dst_slots)


class LosesALayer(Meter):
    """Moves all layers but the last."""

    def kv_transfer(self, src: Any, dst: Any, src_slots: torch.Tensor, dst_slots: torch.Tensor) -> None:
        hal.kv_transfer(src, dst, src_slots, dst_slots, layers=range(src.num_layers - 1))


@pytest.mark.parametrize("ops", [Forgets(CPU), Misses(CPU), LosesALayer(CPU)], ids=lambda o: type(o).__name__)
def test_the_tokens_show_a_transfer_that_fails(ops: Meter) -> None:
    """The control of the test above it: what comes back from the host is what the tokens are made from."""
    e = engine(slots=120, running=3, ops=ops)
    requests = [e.add(p, 20) for p in prompts(3)]
    for _ in range(6):
        e.step()
    e.add([80] * 20, 20, priority=1)
    e.run()
    assert happened(e, "to the host")
    assert compare(transformers_llama(), requests[0]).equal
    found = compare(transformers_llama(), requests[2])
    assert found.differs_at is not None
    assert found.differs_at >= 6
    assert found.gaps is not None


def test_too_few_pages_for_all_pre_empt_the_last() -> None:
    e = engine(slots=64, running=4)
    requests = [e.add(p, 24) for p in prompts(4)]
    e.run()
    assert happened(e, "to the host")
    assert happened(e, "back")
    assert {number for number, _ in happened(e, "to the host")} <= {1, 2, 3}
    assert_same_tokens(requests)
    assert_nothing_held(e)


def test_without_room_on_the_host_tokens_are_computed_again() -> None:
    e = engine(slots=64, host_slots=0, running=4)
    requests = [e.add(p, 24) for p in prompts(4)]
    e.run()
    assert happened(e, "dropped")
    assert not happened(e, "to the host")
    assert_same_tokens(requests)
    assert_nothing_held(e)


def test_who_waits_longest_is_next() -> None:
    """A small request behind a large one that does not fit yet does not slip in before it."""
    e = engine(slots=48, running=3)
    first, large, small = e.add([40] * 24, 16), e.add([41] * 40, 4), e.add([42], 2)
    e.run()
    done = [event.request for event in e.events if event.what == "done"]
    assert done[0] is first
    assert [event.request for event in e.events if event.what == "started"][1] is large
    assert_same_tokens([first, large, small])


@pytest.mark.parametrize("seed", range(8))
def test_any_course_of_events(seed: int) -> None:
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 5, 8])
    slots = rng.randrange(60 // page_size + 1, 130 // page_size) * page_size
    host = rng.choice([0, 40, 120]) // page_size * page_size
    e = engine(slots=slots, host_slots=host, running=rng.randrange(1, 6), page_size=page_size)
    requests = []
    for number in itertools.count():
        if len(requests) < 9 and rng.random() < 0.5:
            prompt = SYSTEM[: rng.randrange(14)] + [rng.randrange(30, 200) for _ in range(rng.randrange(1, 20))]
            requests.append(e.add(prompt, rng.randrange(1, 24), priority=rng.randrange(3)))
        running = [r for r in e.live if r.row is not None]
        if running and rng.random() < 0.1:
            e.preempt(rng.choice(running))
        e.step()
        if len(requests) == 9 and not e.live:
            break
        assert number < 1000, "no end"
    assert_same_tokens(requests)
    assert_nothing_held(e)


def test_bf16_runs_and_its_first_divergence_is_shown() -> None:
    theirs = LlamaForCausalLM(transformers_llama().config).eval().to(torch.bfloat16)
    model = Llama(theirs.config, theirs.state_dict(), Meter(CPU))
    e = Engine(model, slots=240, host_slots=0, max_running=3, max_length=80, page_size=4)
    requests = [e.add(p, 20) for p in prompts(3)]
    e.run()
    assert e.cache.pool.dtype == torch.bfloat16
    for r in requests:
        found = compare(theirs, r)
        assert found.equal or found.gaps is not None
    ours = requests[0]
    ours.tokens[len(ours.prompt) + 3] += 1
    found = compare(theirs, ours)
    assert found.differs_at is not None
    assert found.differs_at <= 3
    assert found.gaps is not None
    ours.tokens[len(ours.prompt) :] = found.tokens[:2]
    assert compare(theirs, ours).differs_at == 2


def test_a_request_that_can_never_run_is_refused() -> None:
    e = engine(slots=40)
    for prompt, new in ([], 4), ([7], 0), ([7] * 40, 1), ([7], 80):
        with pytest.raises(hal.HalError, match=r"hal demo: a request of"):
            e.add(prompt, new)
    assert e.step() == []
    waiting = e.add([7], 2)
    with pytest.raises(hal.HalError, match="not running"):
        e.preempt(waiting)


def test_a_llama_that_the_model_does_not_do_is_refused() -> None:
    theirs = transformers_llama()
    config = LlamaConfig(**{**theirs.config.to_dict(), "attention_bias": True})
    with pytest.raises(ValueError, match="no biases"):
        Llama(config, theirs.state_dict(), Meter(CPU))


def test_the_meter_says_who_ran_what() -> None:
    ops = Meter(CPU)
    with hal.use("reference"):
        e = engine(ops=ops)
        e.add(prompts(1)[0], 5)
        e.step()
        e.preempt(e.live[0])
        e.run()
    uses = {u.op: u for u in ops.uses}
    assert set(uses) == set(OPS)
    assert {(u.backend, u.lane) for u in ops.uses} == {("reference", "device")}
    layers = len(e.model.layers)
    assert uses["rope_kv_write"].calls == 5 * layers
    # The prompt, and once more after it came back: then one of its tokens is new, and no prompt is.
    assert uses["extend_attention"].calls == layers
    assert uses["decode_attention"].calls == 4 * layers
    assert uses["get_last_loc"].calls == uses["write_req_to_token"].calls == 5
    assert uses["alloc_extend"].calls == 2
    assert uses["alloc_decode"].calls == 3
    assert uses["compute_positions"].calls == uses["build_kv_indices"].calls == 5
    assert uses["kv_transfer"].calls == 2
    assert all(0 < u.first <= u.seconds for u in ops.uses)


def test_the_meter_leaves_it_to_the_call_to_say_that_nobody_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = Meter(CPU)
    with hal.use("ascend"), pytest.raises(hal.NoBackendError, match="ascend"):
        PagedCache(
            ops,
            layers=1,
            kv_heads=1,
            head_dim=8,
            slots=8,
            host_slots=0,
            requests=1,
            length=8,
            page_size=4,
            dtype=torch.float32,
            device=CPU,
        ).extend([0], [0], [3])
    with pytest.raises(AttributeError):
        ops._no_op  # noqa: B018


def test_prompts_need_not_be_shared() -> None:
    e = Engine(engine().model, slots=240, host_slots=0, max_running=3, max_length=80, page_size=4, share=False)
    requests = [e.add(p, 4) for p in prompts(3)]
    e.run()
    assert {n for _, n in happened(e, "started")} == {0}
    assert_same_tokens(requests)
    assert_nothing_held(e)
