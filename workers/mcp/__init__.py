"""Tools of other MCP servers as tools of ours: found at a worker's start, called over HTTP or inside sandboxes
(docs/add-a-tool.md).
"""
