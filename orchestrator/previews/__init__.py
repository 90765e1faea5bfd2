"""Previews: HTTP and WebSockets of the ports of sandboxes, each at a host name of its own (docs/sessions.md)."""
