"""Search providers, a file each behind one method."""
