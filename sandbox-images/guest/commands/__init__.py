"""Commands: programs under a supervisor, the shell state, background jobs, and long outputs."""
