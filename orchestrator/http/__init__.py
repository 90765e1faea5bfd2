"""Shared parts of the orchestrator's HTTP services: server, authentication, limits and problems."""
