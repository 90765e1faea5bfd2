"""File tools: read, write and edit files as text in any encoding, and remember which content the session last saw."""
