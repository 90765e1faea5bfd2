"""Tools as Python functions, which run in the program itself or in a worker."""
