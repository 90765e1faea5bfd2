"""Operators' tools in Python: search, loading, and calls in a worker's own process. See docs/add-a-tool.md."""
