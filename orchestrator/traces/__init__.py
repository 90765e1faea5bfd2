"""What a run did, as lines of a file: written while it runs, read, shown and exported afterwards."""
