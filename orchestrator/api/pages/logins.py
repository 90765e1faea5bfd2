"""Logins of the pages. The cookie of a request contains a token, and the token leads to the API key that the person has
logged in with.
"""

import hmac
from dataclasses import dataclass

from starlette.requests import HTTPConnection

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.orchestrator.api.api_state import ApiState
from toolcrew.store.api_keys import Credential, Identity, LoginStore, ShownCredential, login_digest

COOKIE = "toolcrew_login"


@dataclass(frozen=True)
class Login:
    """Login of a person with a valid API key.

    `form_token`: a token that every form of the login contains, so that other sites cannot send forms.
    """

    identity: Identity
    credential: Credential
    form_token: str

    def owns(self, form_token: str) -> bool:
        """Return whether a form token belongs to this login. The comparison takes constant time."""
        return hmac.compare_digest(self.form_token.encode(), form_token.encode(errors="replace"))


class NotLoggedIn(Exception):
    """The request has no valid login. The response is the login page."""


def cookie_name(settings: OrchestratorSettings) -> str:
    """Return the name of the cookie.

    Behind TLS the prefix `__Host-` prevents other hosts of the domain, and pages without TLS, from setting the cookie.
    """
    return f"__Host-{COOKIE}" if is_secure(settings) else COOKIE


def is_secure(settings: OrchestratorSettings) -> bool:
    """Return whether people reach the pages over TLS."""
    return bool(settings.page_url and settings.page_url.startswith("https://"))


def logins_of(app_state: ApiState) -> LoginStore:
    """Return the store of logins."""
    parts = app_state.parts
    return LoginStore(parts.pool.redis, app_state.settings.deployment, parts.pool.keys)


async def find_login(request: HTTPConnection, app_state: ApiState) -> Login:
    """Return the login of the request's cookie. Raises NotLoggedIn, BrokerUnavailable."""
    token, keys = request.cookies.get(cookie_name(app_state.settings), ""), app_state.parts.keys
    key_id = await logins_of(app_state).find(token)
    if key_id is None:
        raise NotLoggedIn
    try:
        identity = await keys.recall(key_id)
    except ToolFailure as error:
        if error.code is not ErrorCode.UNAUTHENTICATED:
            raise
        raise NotLoggedIn from error
    return Login(identity, ShownCredential(keys, identity.key_id), login_digest("form", token))
