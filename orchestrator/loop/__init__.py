"""The ReAct loop: an agent, its transcript, its limits and what fits the context window of its model."""
