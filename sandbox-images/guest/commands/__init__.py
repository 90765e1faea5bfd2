"""Commands: one program under its supervisor, the shell's state, background jobs, long outputs."""
