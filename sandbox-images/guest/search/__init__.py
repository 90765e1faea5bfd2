"""Search requests: find files by a name pattern (glob), and lines by a regular expression."""
