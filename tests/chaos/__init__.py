"""Every process is killed and paused at random moments under load; what must hold is checked from outside. Run by
scripts/chaos.
"""
