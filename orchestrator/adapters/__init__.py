"""Adapters for other frameworks. Each framework has its own files, and only these import the framework's package."""
