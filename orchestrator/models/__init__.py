"""Models with a common interface: those at OpenAI-compatible endpoints, a scripted model for tests, and the embedded
small model.
"""
