"""The guest: PID 1 of a sandbox. Uses only the standard library. docs/guest-protocol.md describes its protocol."""
