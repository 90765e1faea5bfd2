"""File requests: read, write and edit files as text in any encoding. The guest remembers the content that a session
last saw.
"""
