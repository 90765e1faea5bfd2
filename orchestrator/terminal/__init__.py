"""Text for terminals: tables, live lines, and commands that can be pasted."""
