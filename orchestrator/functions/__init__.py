"""Functions of a program as tools: schemas from signatures, foreign tool objects, and running them in this process."""
