"""The stream gateway: the process of a host that connects clients to the stream servers of its sandboxes
(docs/stream-protocol.md).
"""
