"""Connections of programs to the proxy port of the sandbox. The guest relays them to the host over the channel: a
sandbox has no other network access.
"""
