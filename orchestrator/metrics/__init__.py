"""Metrics: the counts of this process, and the metrics page of the deployment (docs/metrics.md)."""
