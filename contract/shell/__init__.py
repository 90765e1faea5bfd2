"""Analysis of shell commands without running them: which programs they start, and how dangerous each program is.
Orchestrators and workers share this code.
"""
