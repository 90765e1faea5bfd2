"""What orchestrator and workers promise each other: records, schemas, codes, names. A leaf: no I/O, imports none of
ours.
"""
