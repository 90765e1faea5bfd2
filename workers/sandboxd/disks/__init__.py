"""Workspaces: where the files of a session are. Each kind is separate from the container that uses it."""
