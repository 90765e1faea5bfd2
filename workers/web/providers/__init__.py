"""Search providers. Each file has one provider, and all providers have the same interface (base.py)."""
