"""Commands: running programs, the state of the session's shell, background jobs, and files of long outputs."""
