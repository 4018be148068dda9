"""A small serving engine over hal's ops, and the `hal demo` that runs it on a real model.

Written to be copied from. Read it in this order: `engine` (which request runs, is pre-empted, comes
back), `cache` (slots, pages, shared prefixes: the bookkeeping ops), `model` (a Llama on
`rope_kv_write`), `meter` (the calls, counted). `weights`, `check`, `screen` and `cli` are the demo's own.

Importing this package imports nothing.
"""
