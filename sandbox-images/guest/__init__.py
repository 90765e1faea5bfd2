"""The guest: PID 1 of a sandbox. Standard library only; docs/guest-protocol.md is what it speaks."""
