"""The side that talks to models and users: loop, dialects, dispatch, SDK, CLI."""
