"""State in Redis, with one module for each kind of record. A module contains the keys and the scripts of its records,
and the methods for orchestrators and workers.
"""
