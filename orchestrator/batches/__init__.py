"""Many runs: a file of lines in, a row for each out."""
