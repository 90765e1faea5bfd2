"""Agent Skills on a worker's host: loading their folders, and running their scripts in sandboxes."""
