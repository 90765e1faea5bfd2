"""The pool's tools for any client of the Model Context Protocol; the only package that knows its SDK (docs/mcp.md)."""
