"""Stores for the archives of sessions: a folder of this host, or a store that several hosts share."""
