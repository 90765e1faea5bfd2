"""Keys that sign calls, results and stored records. One key signs and several are accepted, so a secret can change
while calls run.
"""

import hashlib
import hmac
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pydantic import ValidationError

from toolcrew.contract.errors import ConfigError, EnvelopeRefused, RecordRefused

KEY_ID_CHARS = 12
UNSEAL_LUA = """
-- The text of a sealed record. Scripts cannot check signatures: they use it only to find records that are removed or
-- wait.
local function unsealed(text) return string.match(text or '', '^%x+%.%x+%.(.*)$') or text or '' end
"""


@dataclass(frozen=True)
class SigningKey:
    """Key derived from a secret and a deployment, and the short id by which a receiver finds the key. The id reveals
    nothing about the secret.
    """

    id: str
    key: bytes = field(repr=False)

    @classmethod
    def of(cls, secret: str, deployment: str = "") -> "SigningKey":
        """Derive the key from a secret and the name of the deployment, so that every other deployment refuses the
        records of this one.
        """
        key = hashlib.sha256(b"toolcrew signing v3\0" + deployment.encode() + b"\0" + secret.encode()).digest()
        return cls(hashlib.sha256(b"toolcrew key id\0" + key).hexdigest()[:KEY_ID_CHARS], key)

    def sign(self, purpose: str, data: bytes) -> str:
        """Return the HMAC-SHA-256 in hex. Because of `purpose`, a signature for one kind of text is invalid for every
        other kind.
        """
        return hmac.digest(self.key, purpose.encode(errors="surrogatepass") + b"\0" + data, "sha256").hex()


@dataclass(frozen=True)
class SigningKeys:
    """Keys of a deployment. `current` signs; signatures of `current` and `previous` are accepted."""

    current: SigningKey
    previous: tuple[SigningKey, ...] = ()

    @classmethod
    def of(cls, secret: str, previous: Iterable[str] = (), deployment: str = "") -> "SigningKeys":
        """Derive the keys of a deployment from its current secret and the previous secrets."""
        return cls(SigningKey.of(secret, deployment), tuple(SigningKey.of(text, deployment) for text in previous))

    def find(self, key_id: str) -> SigningKey | None:
        """Return the accepted key of that id, or None."""
        return next((key for key in (self.current, *self.previous) if key.id == key_id), None)

    def holds(self, key_id: str, purpose: str, data: bytes, signature: str) -> bool:
        """Return whether `signature` is valid for these bytes and an accepted key. Never raises."""
        key = self.find(key_id)
        if key is None:
            return False
        return hmac.compare_digest(signature.encode(errors="surrogatepass"), key.sign(purpose, data).encode())

    def seal(self, purpose: str, text: str) -> str:
        """Sign a record for storage in Redis: `<key id>.<signature>.<text>`.

        `purpose` names the kind of record and everything that decides where the record belongs (tenant, id). A
        process without the secret can therefore neither write a record nor copy a genuine record to another place.
        """
        return f"{self.current.id}.{self.current.sign(purpose, text.encode(errors='surrogatepass'))}.{text}"

    def unseal(self, purpose: str, sealed: str | bytes) -> str:
        """Return the text of a sealed record. Raises EnvelopeRefused unless an accepted key signed it for this
        purpose.
        """
        decoded = sealed.decode(errors="replace") if isinstance(sealed, bytes) else sealed
        key_id, _, rest = decoded.partition(".")
        signature, _, text = rest.partition(".")
        if not self.holds(key_id, purpose, text.encode(errors="surrogatepass"), signature):
            raise EnvelopeRefused(
                f"the signature of this record ({purpose.partition(' ')[0]}) is wrong: its writer does not share "
                "TOOLCREW_SECRET with this process. Use the same secret everywhere; if you do, another program has "
                "written to Redis",
                "signature",
            )
        return text


@contextmanager
def readable(name: str, advice: str, consequence: str = "it is not used") -> Iterator[None]:
    """Context manager around code that reads a stored record. It raises RecordRefused for a record that is not signed
    for the key or field where it is stored, and ConfigError for a record that another release wrote. The messages of
    both errors say what to do, and contain no text of the record.
    """
    try:
        yield
    except EnvelopeRefused as error:
        raise RecordRefused(f"{name} cannot be verified, so {consequence}: {advice}. {error}") from error
    except ValueError as error:
        reason = ""
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False, include_input=False)[0]
            reason = f" ({'.'.join([*map(str, first['loc']), first['type']])})"
        raise ConfigError(f"{name} cannot be read{reason}, so {consequence}: {advice}") from error


@dataclass(frozen=True)
class ResultSeal:
    """Signs and checks the results of one tenant's calls, so that a process that can write to Redis cannot forge one.

    A result is valid for one attempt only. Otherwise the result "not run" of an earlier attempt could be replayed, and
    a later attempt that runs would be sent again.
    """

    keys: SigningKeys
    tenant: str
    attempt: int = 1

    def close(self, text: str) -> str:
        """Return the encoded result with its signature."""
        return self.keys.seal(self._purpose(), text)

    def open(self, sealed: str) -> str:
        """Return the text of a signed result. Raises EnvelopeRefused unless an accepted key signed it for this tenant
        and attempt.
        """
        return self.keys.unseal(self._purpose(), sealed)

    def _purpose(self) -> str:
        return f"result {self.tenant} {self.attempt}"
