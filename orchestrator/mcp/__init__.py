"""MCP server for the tools of the pool (docs/integrations.md). Only this package imports the MCP SDK in the
orchestrator.
"""
