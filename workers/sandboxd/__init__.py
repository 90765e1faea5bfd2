"""The per-host daemon that owns the engine socket: creates sandboxes, feeds them, limits them, removes them."""
