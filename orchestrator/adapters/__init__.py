"""toolcrew inside other frameworks: a file (or a few of one name) for each, and that framework's package is imported
nowhere else.
"""
