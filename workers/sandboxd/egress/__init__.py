"""Relays the connections of a sandbox with network to the egress proxy of its host."""
