"""The tools that a worker can run. Each file contains a tool's specification and its handler."""
