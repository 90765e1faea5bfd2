"""Random input for what reads hostile text: `scripts/fuzz`, and a short run of it among the unit tests."""
