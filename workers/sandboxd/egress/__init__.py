"""The connections that a sandbox with network opens, relayed to the egress proxy of its host."""
