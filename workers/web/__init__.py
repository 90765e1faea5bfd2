"""The way to the web: judged addresses, bounded bodies, pages as text, search providers."""
