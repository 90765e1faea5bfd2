"""Files: read, written and edited as text, whatever their encoding; what the session has seen of them."""
