"""Random input for the parsers of hostile text: used by `scripts/fuzz`, and for a short run in the unit tests."""
