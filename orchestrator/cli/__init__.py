"""The command `toolcrew`, one module for each group of commands."""
