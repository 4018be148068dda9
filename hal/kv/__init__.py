"""The KV cache: pools and their layouts, slot allocation, plans of copies."""
