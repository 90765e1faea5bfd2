"""Formats in which a model requests tools and reads their results: native `tool_calls`, tags, JSON."""
