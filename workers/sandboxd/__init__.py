"""The daemon of a host that owns the engine socket. It creates, supplies, limits and removes sandboxes."""
