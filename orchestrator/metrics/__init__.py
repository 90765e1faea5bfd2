"""Metrics: what this process counts, and the page that tells the deployment's (docs/metrics.md)."""
