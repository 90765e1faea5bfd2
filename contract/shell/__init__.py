"""Shell commands, read without running them: the programs they name, and how dangerous each is. Both sides of the queue
judge alike.
"""
