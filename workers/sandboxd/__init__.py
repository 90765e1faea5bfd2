"""sandboxd: the only process of a host that uses the socket of the Docker engine. It creates, limits and removes
sandboxes and stores their files.
"""
