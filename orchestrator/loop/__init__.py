"""The ReAct loop: an agent, its transcript, its limits, and the shortening of requests to the context window of its
model.
"""
