"""Tools of other MCP servers, offered as tools of this deployment. A worker lists them at its start, and calls them
over HTTP or inside sandboxes (docs/add-a-tool.md).
"""
