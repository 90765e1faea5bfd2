"""Search: names by glob, contents by regular expression."""
