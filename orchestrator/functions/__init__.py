"""Functions of a program as tools: foreign tool objects, and running them in this process."""
