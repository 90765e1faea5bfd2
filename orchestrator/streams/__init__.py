"""Streams of sandboxes for API processes: processes, files and ports (docs/stream-protocol.md)."""

from toolcrew.orchestrator.streams.client import Streams, StreamTarget
from toolcrew.orchestrator.streams.stream import Stream, StreamPiece

__all__ = ["Stream", "StreamPiece", "StreamTarget", "Streams"]
