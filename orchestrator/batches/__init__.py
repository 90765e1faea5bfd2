"""Batches of runs: an input file with one item per line, and an output row for each item."""
