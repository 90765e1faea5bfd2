"""Public interface for programs: ToolClient, sessions as tools, functions as tools, and the documented names."""
