"""Tools of a session as other frameworks take them: one file a framework, and only that file imports it."""
