"""Concurrency in one process: tasks of the event loop, and threads and memory that tenants share."""
