"""Log lines and spans for orchestrators and workers. Of toolcrew's packages, this package imports only contract."""
