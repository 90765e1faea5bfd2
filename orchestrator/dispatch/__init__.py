"""Delivery of calls to workers and of results back, and the sessions that calls run in."""
