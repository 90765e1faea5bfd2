"""The guest: the program that runs as PID 1 of a sandbox and serves requests. It uses only the standard library.
docs/guest-protocol.md describes its protocol.
"""
