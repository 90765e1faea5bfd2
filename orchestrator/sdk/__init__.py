"""What programs import: ToolClient, sessions as tools, functions as tools, and the documented names."""
