"""Agent Skills on a worker's host: load skill folders and run their scripts in sandboxes."""
