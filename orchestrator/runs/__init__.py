"""Durable runs: logged as they go, claimed by whoever is there, gone on with where a process left them that died."""
