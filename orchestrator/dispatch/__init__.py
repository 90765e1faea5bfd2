"""Delivery of calls to workers and of results back, and the places of the sessions that calls run in."""
