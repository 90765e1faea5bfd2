"""Text for terminals: runs, calls, tables, and commands that can be pasted."""
