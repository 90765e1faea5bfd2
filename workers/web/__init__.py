"""Access to the web: checked addresses, bounded bodies, pages as text, and search providers."""
