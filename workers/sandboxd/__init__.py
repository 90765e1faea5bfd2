"""sandboxd: the only process of a host that uses the socket of the engine (Docker or containerd). It creates, limits
and removes sandboxes and stores their files.
"""
