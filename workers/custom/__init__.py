"""Tools that an operator writes in Python: found, loaded and run in a worker's own process. How to write one:
docs/add-a-tool.md.
"""
