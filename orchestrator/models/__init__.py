"""Models behind one Protocol: OpenAI-compatible endpoints, a scripted one for tests, the embedded small one."""
