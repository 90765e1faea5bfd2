"""The way of a call to a worker and of its result back, and the sessions that calls run in."""
