"""Workspaces: the storage of a session's files. Each kind is separate from the container that uses it."""
