"""The store of archives: checkpoints of sessions, uploaded files and artifacts, in a folder or in an object store."""
