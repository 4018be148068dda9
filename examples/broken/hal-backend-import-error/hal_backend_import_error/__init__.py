"""A plugin that breaks when it is imported. `hal info` shows it as broken, and why; nothing else suffers."""

raise RuntimeError("the vendor's library is of another version")
