"""Chaos tests: processes are killed and paused at random moments under load, and the results are checked from
outside. scripts/chaos runs the tests.
"""
