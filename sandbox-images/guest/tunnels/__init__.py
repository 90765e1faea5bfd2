"""Connections of programs to the proxy port. The channel relays them: a sandbox has no other network access."""
