"""``hal bench link``: a `Link` between two processes, beside NIXL alone with the same bytes, in one run.

`plain` writes pages that are in staging memory already to the other: what NIXL does at best. `link` is all of it: rows
packed, written, notified, unpacked and acknowledged. The rows are compared first. `steps` says when each of these
was over.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

import hal
from hal.engines.nixl import Link, Peer, Transfer, wait

ROW = (8, 128)
"""Of Llama-3.1-8B: KV heads and their size; bf16."""


def _pool(tokens: int, layers: int, layout: str, device: str) -> hal.KVPool:
    n, (h, d) = tokens, ROW
    shape = {"layer_first": (layers, n, h, d), "page_head": (n // 16, h, 16, layers, d)}[layout]
    k, v = (torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
    return hal.KVPool(k, v, layout, 16)


def _receive(pipe: Connection, tokens: int, layers: int, layout: str, device: str) -> None:
    """The other process: receives what it is told to, and says how the rows begin."""
    with Link(_pool(tokens, layers, layout, device), model="bench", staging=tokens) as link:
        pipe.send(link.address)
        wait(link.accept())
        slots = torch.arange(tokens, dtype=torch.int64, device="cpu")
        received: Transfer | None = None
        while True:
            if not pipe.poll():
                link.poll()
                continue
            asked = pipe.recv()
            if asked is None:
                return
            if asked == "rows":
                pipe.send(
                    [
                        half[:64].cpu().float().reshape(64, -1).sum(1).tolist()
                        for half in _rows(link.pool)
                        if half is not None
                    ]
                )
            elif asked == "steps":
                pipe.send(received.steps if received else {})
            else:
                received = link.receive(asked, slots)


def _rows(pool: hal.KVPool) -> list[torch.Tensor]:
    """k and v of the last layer, by slot."""
    return [half.reshape(-1, *ROW) for half in pool.layer(pool.num_layers - 1) if half is not None]


def _plain(link: Link, peer: Peer, tokens: int) -> float:
    pages = list(range(-(-tokens // 16)))
    here, there = link.wire.descriptors(pages, 0, peer.wire, pages, 0, link.wire.heads)
    begin = time.perf_counter()
    handle = link.agent.write(here, there, peer.wire["memory"], peer.name, "bench")
    while link.agent.moving(handle):
        pass
    seconds = time.perf_counter() - begin
    link.agent.release(handle)
    return seconds


def _steps(sent: Transfer, received: dict[str, float]) -> dict[str, float]:
    """When each step was over, in seconds after it began: both processes have one clock."""
    names = {"packed": "packed", "posted": "begun to write", "written": "written", "acknowledged": "done"}
    at = {name: sent.steps[of] for name, of in names.items()}
    at |= {"arrived": received["arrived"], "unpacked": received["done"]}
    begin = sent.steps["asked for"]
    return {name: t - begin for name, t in sorted(at.items(), key=lambda item: item[1])}


def measure(tokens: int, layers: int, rounds: int, device: str, layout: str, to_device: str = "") -> dict[str, Any]:
    """GB/s of both, medians of `rounds`, interleaved.

    Args:
        to_device: the receiver's, ``cpu`` or ``cuda``; ``""``: as `device`. Where there are two GPUs, both are used.

    Raises:
        HalError: rows came otherwise than they were sent.
    """
    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    second = to_device or device
    if device == second == "cuda" and torch.cuda.device_count() > 1:
        second = "cuda:1"
    child = spawn.Process(target=_receive, args=(theirs, tokens, layers, layout, second), daemon=True)
    child.start()
    theirs.close()  # so that its end is heard of
    pool = _pool(tokens, layers, "layer_first", device)
    for t in pool.tensors:
        t.copy_(torch.randn(t.shape, dtype=torch.float32, device=t.device))
    slots = torch.arange(tokens, dtype=torch.int64, device="cpu")
    found: dict[str, list[float]] = {"plain": [], "link": []}
    steps: dict[str, list[float]] = {}
    try:
        with Link(pool, model="bench", staging=tokens) as link:
            peer = link.connect(pipe.recv())
            wait(peer)
            for i in range(rounds + 1):
                pipe.send(f"r{i}")
                while f"r{i}" not in peer.wants and peer.error is None:
                    link.poll()
                begin = time.perf_counter()
                sent = link.send(peer, f"r{i}", slots)
                while not sent.ended:
                    link.poll()
                seconds = time.perf_counter() - begin
                wait(sent)
                if i == 0:
                    pipe.send("rows")
                    got, want = (
                        pipe.recv(),
                        [r[:64].cpu().float().reshape(64, -1).sum(1).tolist() for r in _rows(pool)],
                    )
                    if got != want:
                        raise hal.HalError("hal: bench link: the rows came otherwise than they were sent")
                pipe.send("steps")
                over = _steps(sent, pipe.recv())
                plain = _plain(link, peer, tokens)
                if i:
                    for name, at in over.items():
                        steps.setdefault(name, []).append(at)
                    found["link"].append(seconds)
                    found["plain"].append(plain)
            pipe.send(None)
    finally:
        child.join(10)
        child.kill()
    size = sum(t.numel() * t.element_size() for t in pool.tensors)
    rates = {name: size / statistics.median(times) / 1e9 for name, times in found.items()}
    return {
        "device": device,
        "to device": second,
        "to": layout,
        "bytes": size,
        "tokens": tokens,
        "layers": layers,
        **{f"{name} GB/s": rate for name, rate in rates.items()},
        "link / plain": rates["link"] / rates["plain"],
        "steps, ms": {name: statistics.median(times) * 1e3 for name, times in steps.items()},
    }


def main(device: str, to_device: str, tokens: int, layers: int, rounds: int, as_json: bool) -> int:
    rows = [measure(tokens, layers, rounds, device, layout, to_device) for layout in ("layer_first", "page_head")]
    if as_json:
        print(json.dumps(rows))
        return 0
    print(f"{'device':<13}{'from':<13}{'to':<13}{'MB':>6}{'plain GB/s':>12}{'link GB/s':>12}{'link / plain':>14}")
    for r in rows:
        devices = f"{r['device']}, {r['to device']}"
        print(
            f"{devices:<13}{'layer_first':<13}{r['to']:<13}{r['bytes'] / 1e6:>6.0f}{r['plain GB/s']:>12.3f}"
            f"{r['link GB/s']:>12.3f}{r['link / plain']:>14.3f}"
        )
        print("  over after: " + ", ".join(f"{name} {ms:.2f}" for name, ms in r["steps, ms"].items()) + " ms")
    return 0
