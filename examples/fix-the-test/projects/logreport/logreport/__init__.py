"""Reports on logs of a web service."""
