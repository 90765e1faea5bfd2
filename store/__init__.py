"""State in Redis, one module for each kind of record: its keys, its scripts, and the methods of orchestrators and of
workers.
"""
