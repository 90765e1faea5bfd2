"""What the HTTP services of the orchestrator share: the server, authentication, limits and problems."""
