"""State in Redis, with one module for each kind of record. A module contains the keys and the scripts of its records,
and the methods for orchestrators and workers.

Two parts are not in Redis. They are here because orchestrators and workers share them, and contract does no I/O:
`archives/` stores files in a folder or an object store, and `tasks.py` and `tenant_threads.py` run asynchronous work.
"""
