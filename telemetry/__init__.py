"""Spans of both sides of the queue: how they are named, kept and sent to a collector. Imports contract, and is imported
only where spans are made.
"""
