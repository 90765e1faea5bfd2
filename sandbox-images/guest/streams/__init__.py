"""The stream server: a process that PID 1 forks, or that the host starts. It serves terminals, processes, files and
ports over a channel of its own, so that their bytes never delay calls.
"""
