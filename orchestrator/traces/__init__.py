"""Records what a run did as lines of a file. Reads, shows and exports these lines afterwards."""
