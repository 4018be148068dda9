"""The tables of ``hal bench --device cuda``: ours and every importable peer, in one run.

Each module has the tables of a family of ops: `TABLES`, table -> what makes its rows.
"""

from __future__ import annotations

MODULES = ("launch", "bookkeeping", "kv_write", "rope", "kv_copy", "hicache", "attention", "mla", "block_table")
