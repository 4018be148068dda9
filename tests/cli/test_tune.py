"""The cost tables that `hal tune` makes, which ``method="auto"`` reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hal import tune


def test_cost_tables_are_of_one_machine_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["One GPU", "Other GPU"]
    monkeypatch.setattr(tune, "cache_dir", lambda: str(tmp_path / "new"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: names[i])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert tune.load("kv_transfer", 0) is None
    file = tune.save("kv_transfer", 0, {"kernel": [[1.0, 2.0]]})
    assert tune.load("kv_transfer", 0) == {"kernel": [[1.0, 2.0]]}
    assert tune.load("kv_transfer", 1) is None
    assert tune.load("kv_move", 0) is None
    assert [*file.parent.iterdir()] == [file]
    file.write_text("{")
    assert tune.load("kv_transfer", 0) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.load("kv_transfer", 0) is None
