"""Connections of programs to the proxy port, relayed over the channel: a sandbox has no other way out."""
