"""Contract between orchestrator and workers: records, schemas, error codes and names. It does no I/O and imports no
other package of toolcrew.
"""
