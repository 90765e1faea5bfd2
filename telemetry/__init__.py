"""Log lines and spans of both sides of the queue. Imports only contract."""
