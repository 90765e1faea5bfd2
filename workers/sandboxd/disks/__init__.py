"""Where a session's files live: kinds of workspace, each apart from the container that works in it."""
