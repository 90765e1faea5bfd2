"""The tools this side can run: the spec beside the handler, a file each."""
