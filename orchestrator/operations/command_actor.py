"""Finds the actor of a command: the holder of TOOLCREW_API_KEY, or the local administrator."""

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.store.api_keys import ApiKeys
from toolcrew.store.audit import Actor, Role, local_actor
from toolcrew.store.connection import RedisClient


async def find_actor(client: RedisClient, settings: OrchestratorSettings, needed: Role) -> Actor:
    """Return the holder of TOOLCREW_API_KEY. Without a key, return the local administrator, who has the deployment's
    own secrets.

    Raises ToolFailure(UNAUTHENTICATED, PERMISSION_DENIED), BrokerUnavailable.
    """
    if settings.api_key is None:
        return local_actor()
    keys = ApiKeys(client, settings.deployment, settings.broker().signing_keys())
    actor = (await keys.authenticate(settings.api_key.get_secret_value())).actor()
    if not actor.has_role(needed):
        allowed = "admin" if needed == "admin" else f"{needed} or admin"
        raise ToolFailure(
            ErrorCode.PERMISSION_DENIED,
            f"this command needs an API key of the role {allowed}, and TOOLCREW_API_KEY is a key of the role "
            f"{actor.role}: use another key",
        )
    return actor
