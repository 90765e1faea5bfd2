"""Search tools: find names by glob and contents by regular expression."""
