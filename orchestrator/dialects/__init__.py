"""How a model asks for tools and reads their results: native tool_calls, `<tool_action>` tags."""
