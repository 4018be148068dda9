"""Plans whose launches are begun as one graph: how it is made and set, and when they are launched one by one."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from launch.planned import WARM, A, B, Rig, rig
from launch.rig import BASE, CPU, EMPTY, Graphs, helper
from triton import knobs

from hal.triton.plans import COUNTERS, Plan, Step, length

__all__ = ["helper", "rig"]


@pytest.fixture
def graphs(helper: Any, rig: Rig) -> Iterator[Graphs]:
    """What the driver is told of graphs, for a call of two launches that are begun as one up to 128 of b."""
    told = Graphs(rig.driver)
    helper.drive(CPU, *rig.driver.addresses(), knobs.runtime, knobs.compilation, EMPTY, 0, told.addresses())
    make = rig.plans.make
    rig.plans.make = lambda *args: make(*args)._replace(as_graph=length("b").within(128))
    yield told
    assert not told.wrong
    assert told.mode == 0


def test_a_brief_call_s_launches_are_begun_as_a_graph(helper: Any, rig: Rig, graphs: Graphs) -> None:
    """With the parameters and programs of each call, and as their launches would follow each other."""
    rig(A, B)
    assert not graphs.made
    assert helper.graphs() == 0
    assert rig(A, B) == []
    assert (graphs.of, graphs.made, graphs.destroyed) == ([[7, 8]], [[(101, 102, 1)]], [])
    ((graph, stream, (one, two)),) = graphs.launched
    assert (graph, stream) == (1, None)
    assert (one[:2], two[:2]) == ((7, (9, 1, 1, 128, 96)), (8, (128, 1, 1, 128, 96)))
    of_first, of_second = ([int.from_bytes(v, "little") for v in node[2]] for node in (one, two))
    assert of_first[:3] == [A.data_ptr(), B.data_ptr(), rig.lent[COUNTERS:].data_ptr()]
    assert of_second == [B.data_ptr(), rig.lent[COUNTERS + 32 :].data_ptr(), 256]
    assert rig(BASE[512:544].view(1, 32), BASE[128:224], 0.25) == []
    _, (_, _, (one, two)) = graphs.launched
    assert (one[1][0], two[1][0]) == (7, 96)
    assert int.from_bytes(one[2][0], "little") == BASE[512:].data_ptr()
    assert len(graphs.made) == helper.graphs() == 1


def test_other_calls_are_launched_one_by_one(rig: Rig, graphs: Graphs) -> None:
    """A longer one; one of whose launches one alone is due; one that is captured."""
    rig(A, B)
    assert [f for f, _ in rig(A, BASE[256:385])] == [7, 8]
    assert [f for f, _ in rig(A, BASE[256:320])] == [7]
    rig.driver.capturing = 1
    assert [f for f, _ in rig(A, B)] == [7, 8]
    assert not graphs.made


def test_without_scratch_no_graph_is_made(rig: Rig, graphs: Graphs) -> None:
    """Nothing else keeps other threads out, and captures."""
    make = rig.plans.make
    rig.plans.make = lambda *args: make(*args)._replace(
        scratch=None, steps=(Step(make(*args).steps[1].run, length("b"), ("b", "a", length("b"))),) * 2
    )
    rig(A, B)
    assert [f for f, _ in rig(A, B)] == [8, 8]
    assert not graphs.made


@pytest.mark.parametrize("what", ["create", "add", "connect", "instantiate", "exchange", "priority", "partition"])
def test_where_the_driver_makes_no_graph_they_are_launched(helper: Any, rig: Rig, graphs: Graphs, what: str) -> None:
    """From then on, without asking it again."""
    rig(A, B)
    graphs.fails[what] = 801
    assert rig(A, B) == WARM
    graphs.fails.clear()
    again = what == "exchange"  # of which it has not asked for a graph
    assert rig(A, B) == ([] if again else WARM)
    assert len(graphs.launched) == helper.graphs() == again
    assert graphs.destroyed == ([1] if what in ("add", "connect", "instantiate") else [])


@pytest.mark.parametrize("stream", [{"priority": -1}, {"partition": 77}], ids=str)
def test_what_a_stream_has_that_a_graph_would_not_is_launched(
    rig: Rig, graphs: Graphs, stream: dict[str, int | None]
) -> None:
    """A priority; a part of the multiprocessors, as where prompts and decoding share a GPU."""
    graphs.stream |= stream
    rig(A, B)
    assert rig(A, B) == rig(A, B) == WARM
    assert not graphs.made


def test_parameters_that_a_graph_does_not_take_are_launched(rig: Rig, graphs: Graphs) -> None:
    rig(A, B)
    graphs.fails["change"] = 910
    assert rig(A, B) == WARM
    graphs.fails.clear()
    assert rig(A, B) == []
    assert len(graphs.launched) == 1


def test_a_graph_that_fails_is_told_and_nothing_is_launched_twice(rig: Rig, graphs: Graphs) -> None:
    rig(A, B)
    graphs.fails["launch"] = 719
    with pytest.raises(RuntimeError, match="cuGraphLaunch: error 719"):
        rig(A, B)
    assert not rig.driver.started


def test_every_pair_of_kernels_has_a_graph_of_its_own_while_there_is_room(rig: Rig, graphs: Graphs) -> None:
    make = rig.plans.make

    def starts(*which: int) -> list[Any]:
        def made(*args: Any) -> Plan:
            plan = make(*args)
            return plan._replace(steps=tuple(plan.steps[i] for i in which))

        rig.plans.make = made
        rig.plans.clear()
        rig(A, B)
        return [f for f, _ in rig(A, B)]

    assert starts(0, 1) == starts(1, 0) == starts(1, 0, 1) == starts(0, 1) == []
    assert graphs.of == [[7, 8], [8, 7], [8, 7, 8]]
    assert graphs.made == [[(101, 102, 1)], [(201, 202, 1)], [(301, 302, 1), (302, 303, 1)]]
    assert [graph for graph, _, _ in graphs.launched] == [1, 2, 3, 1]
    assert starts(1, 1, 1, 1, 1) == [8] * 5


def test_threads_launch_a_graph_one_at_a_time(rig: Rig, graphs: Graphs) -> None:
    """One that sets its parameters must not find another's half set."""
    rig(A, B)
    rig(A, B)
    graphs.launched.clear()
    others = [(A, B), (BASE[512:544].view(1, 32), BASE[128:224])]

    def calls(own: tuple[Any, Any]) -> None:
        for _ in range(50):
            rig.plans.start(*own, 0.5, 3)

    threads = [threading.Thread(target=calls, args=(others[i % 2],)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    grids = [tuple(node[1][0] for node in nodes) for _, _, nodes in graphs.launched]
    assert sorted(grids) == [(7, 96)] * 100 + [(9, 128)] * 100
