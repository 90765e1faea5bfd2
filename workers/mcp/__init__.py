"""Tools of other MCP servers, offered as tools of this deployment. A worker asks each server for its tools at the
start. It calls the tools over HTTP or inside sandboxes (docs/add-a-tool.md).
"""
