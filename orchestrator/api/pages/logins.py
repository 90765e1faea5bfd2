"""Who is logged in to the pages: a random word in a cookie, whose digest Redis keeps beside the id of the API key that was shown."""

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from contract.errors import EnvelopeRefused, ErrorCode, ToolFailure
from contract.names import deployment_key
from contract.signing import SigningKeys
from orchestrator.api.house import House
from orchestrator.settings import OrchestratorSettings
from store.api_keys import ApiKeys, Credential, Identity, ShownCredential
from store.connection import RedisClient, broker_errors
from telemetry.logs import get_logger

log = get_logger(__name__)

LOGIN_S = 12 * 3600
LOGINS_OF_A_KEY = 100
"""At a time; another ends the one that began first, so that who logs in again and again does not fill Redis."""
COOKIE = "toolcrew_login"
_WORD = re.compile(r"[A-Za-z0-9_-]{43}")

_WHAT = "the login was not stored, read or deleted"
_OPEN = """
-- KEYS: login, the logins of the API key. ARGV: the key's id, how long a login lasts, most logins of a key.
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
redis.call('RPUSH', KEYS[2], KEYS[1])
redis.call('EXPIRE', KEYS[2], ARGV[2])
if redis.call('LLEN', KEYS[2]) > tonumber(ARGV[3]) then redis.call('DEL', redis.call('LPOP', KEYS[2])) end
"""


@dataclass(frozen=True)
class Login:
    """Somebody who has shown a key that still holds. `form_token`: what each of his forms carries, so that nobody else's are taken for them."""

    identity: Identity
    credential: Credential
    form_token: str

    def owns(self, form_token: str) -> bool:
        return hmac.compare_digest(self.form_token.encode(), form_token.encode(errors="replace"))


class Logins:
    """The logins of a deployment; each ends LOGIN_S after it began. Every method raises BrokerUnavailable when Redis does not answer."""

    def __init__(self, client: RedisClient, deployment: str, keys: ApiKeys, signing: SigningKeys) -> None:
        self._client, self._signing = client, signing
        self._open_script = client.register_script(_OPEN)
        self._deployment = deployment
        self._keys = keys

    async def open(self, identity: Identity) -> str:
        """Begin a login for the holder of a key, and return its word."""
        word = secrets.token_urlsafe(32)
        # Signed for its slot: a process that can write to Redis could else log in as the holder of any key.
        sealed = self._signing.seal(self._purpose(word), identity.key_id)
        with broker_errors(_WHAT):
            await self._open_script(keys=[self._slot(word), self._list(identity.key_id)], args=[sealed, LOGIN_S, LOGINS_OF_A_KEY])
        return word

    async def find(self, word: str) -> Login | None:
        """The login of a word; None when there is none, or none any more. Raises ToolFailure(UNAUTHENTICATED) when its key holds no longer."""
        if not _WORD.fullmatch(word):
            return None
        with broker_errors(_WHAT):
            sealed: Any = await self._client.get(self._slot(word))
        if sealed is None:
            return None
        try:
            key_id = self._signing.unseal(self._purpose(word), sealed)
        except EnvelopeRefused as error:
            log.error("login_refused", error=str(error))
            return None
        identity = await self._keys.recall(key_id)
        return Login(identity, ShownCredential(self._keys, identity.key_id), _digest("form", word))

    async def close(self, word: str) -> None:
        """End a login, if there is one."""
        with broker_errors(_WHAT):
            await self._client.delete(self._slot(word))

    def _purpose(self, word: str) -> str:
        return f"login {_digest('login', word)}"

    def _slot(self, word: str) -> str:
        return deployment_key(self._deployment, f"page:login:{_digest('login', word)}")

    def _list(self, key_id: str) -> str:
        return deployment_key(self._deployment, f"page:logins:{key_id}")


class NotLoggedIn(Exception):
    """There is nobody: the login page comes first."""


def cookie_name(settings: OrchestratorSettings) -> str:
    """Behind TLS one that no neighbour of ours, and nobody without TLS, can set."""
    return f"__Host-{COOKIE}" if is_secure(settings) else COOKIE


def is_secure(settings: OrchestratorSettings) -> bool:
    """Whether people reach the pages over TLS."""
    return bool(settings.page_url and settings.page_url.startswith("https://"))


def logins_of(house: House) -> Logins:
    parts = house.parts
    return Logins(parts.pool.redis, house.settings.deployment, parts.keys, parts.pool.keys)


async def find_login(request: Request, house: House) -> Login:
    """Whose cookie it is. Raises NotLoggedIn, BrokerUnavailable."""
    try:
        login = await logins_of(house).find(request.cookies.get(cookie_name(house.settings), ""))
    except ToolFailure as error:
        if error.code is not ErrorCode.UNAUTHENTICATED:
            raise
        login = None
    if login is None:
        raise NotLoggedIn
    return login


def _digest(purpose: str, word: str) -> str:
    """Of 32 random bytes: nobody finds them by trying, so a plain hash does."""
    return hashlib.sha256(f"toolcrew page {purpose} v1\0{word}".encode(errors="replace")).hexdigest()
