"""Calls of ops on behalf of another process: their arguments lie in memory that both have mapped.

Whoever asks knows what must come out, and looks at it in its own process; here are only a backend and the calls
that are made of it. Nothing in this package knows a right answer.
"""
