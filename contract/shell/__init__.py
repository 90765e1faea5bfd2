"""Shell commands, read without running them: their programs, and how dangerous each is. Orchestrators and workers
share this code.
"""
