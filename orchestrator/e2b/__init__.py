"""The API of E2B, for its clients."""
