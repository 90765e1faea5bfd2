"""The connection to Redis that tests of this folder use."""

from tests.support.redis.fixtures import client

__all__ = ["client"]
