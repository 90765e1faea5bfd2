"""Starts and removes containers. The only folder that imports docker."""
