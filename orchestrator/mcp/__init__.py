"""Serves the pool's tools to clients of the Model Context Protocol (docs/integrations.md). Only this package imports
its SDK on this side.
"""
