"""Durable runs. Any process can claim a run. Each step is logged, so another process can continue after a crash."""
