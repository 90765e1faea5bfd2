"""Sessions as their users see them: calls and files of one sandbox, and workspaces. The SDK and runs are above."""
