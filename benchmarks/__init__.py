"""Benchmarks that compare toolcrew with a bare baseline and with other systems: `scripts/bench`, docs/testing.md."""
