"""Models behind one Protocol: OpenAI-compatible endpoints, a scripted model for tests, the embedded small model."""
