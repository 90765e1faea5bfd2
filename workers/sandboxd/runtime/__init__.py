"""Start and removal of containers. Only this folder imports docker."""
