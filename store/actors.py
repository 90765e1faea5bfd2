"""Who does something to a deployment: the holder of an API key, or whoever runs a program that has the pool's own secrets."""

import os
import pwd
from typing import Literal, get_args

from pydantic import Field

from contract.calls import Identifier, Record

Role = Literal["tenant", "operator", "admin"]
"""tenant: calls for its own tenant; operator: for any; admin: also sets what tenants may have."""
_ROLES: tuple[Role, ...] = get_args(Role)
LOCAL = "local"
MAX_NAME_CHARS = 128


class Actor(Record):
    """`key`: the id of an API key; "local" for whoever has the pool's own secrets, whose `name` is that of the system's user. `tenant`: whose key it
    is; None for local ones."""

    key: str = Field(max_length=64)
    role: Role
    name: str = Field(default="", max_length=MAX_NAME_CHARS)
    tenant: Identifier | None = None

    def may_act_for(self, tenant: str | None) -> bool:
        """None: for everybody."""
        return self.role != "tenant" or (tenant is not None and tenant == self.tenant)

    def has_role(self, needed: Role) -> bool:
        """Return whether the role has all rights of `needed`."""
        return _ROLES.index(self.role) >= _ROLES.index(needed)

    def label(self) -> str:
        """In one word, for people."""
        return self.name or self.key


def local_actor() -> Actor:
    """Whoever runs this program."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        name = f"uid {os.getuid()}"
    return Actor(key=LOCAL, role="admin", name=name[:MAX_NAME_CHARS])
