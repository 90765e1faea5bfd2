"""The keys that sign what crosses the queue: one signs, some are accepted, so that a secret changes while calls are on their way."""

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field

from contract.errors import EnvelopeRefused

KEY_ID_CHARS = 12


@dataclass(frozen=True)
class SigningKey:
    """A key made of a secret text, and the short name by which a receiver finds it. The name tells nothing that a signature does not."""

    id: str
    key: bytes = field(repr=False)

    @classmethod
    def of(cls, secret: str) -> "SigningKey":
        key = hashlib.sha256(b"toolcrew signing v2\0" + secret.encode()).digest()
        return cls(hashlib.sha256(b"toolcrew key id\0" + key).hexdigest()[:KEY_ID_CHARS], key)

    def sign(self, purpose: str, data: bytes) -> str:
        """HMAC-SHA-256 in hex. `purpose` keeps one kind of text from being taken for another."""
        return hmac.new(self.key, purpose.encode() + b"\0" + data, hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class SigningKeys:
    """`current` signs; it and `previous` are accepted."""

    current: SigningKey
    previous: tuple[SigningKey, ...] = ()

    @classmethod
    def of(cls, secret: str, previous: Iterable[str] = ()) -> "SigningKeys":
        """Keys of secret texts."""
        return cls(SigningKey.of(secret), tuple(SigningKey.of(text) for text in previous))

    def find(self, key_id: str) -> SigningKey | None:
        """The accepted key of that name."""
        return next((key for key in (self.current, *self.previous) if key.id == key_id), None)

    def holds(self, key_id: str, purpose: str, data: bytes, signature: str) -> bool:
        """Whether `signature` is that of an accepted key for these very bytes. Anything may be given."""
        key = self.find(key_id)
        if key is None:
            return False
        return hmac.compare_digest(signature.encode(errors="surrogatepass"), key.sign(purpose, data).encode())


@dataclass(frozen=True)
class ResultSeal:
    """Signs the records of a tenant's results on their way back: whoever can write to Redis cannot say what a call gave."""

    keys: SigningKeys
    tenant: str

    def close(self, text: str) -> str:
        """`<key id>.<signature>.<text>`."""
        key = self.keys.current
        return f"{key.id}.{key.sign(self._purpose(), text.encode())}.{text}"

    def open(self, sealed: str) -> str:
        """The text. Raises EnvelopeRefused unless an accepted key signed it for this tenant."""
        key_id, _, rest = sealed.partition(".")
        signature, _, text = rest.partition(".")
        if not self.keys.holds(key_id, self._purpose(), text.encode(errors="surrogatepass"), signature):
            raise EnvelopeRefused(
                "nobody with the secret signed this result: worker and sender do not share TOOLCREW_SECRET, or somebody wrote to Redis",
                "signature",
            )
        return text

    def _purpose(self) -> str:
        return f"result {self.tenant}"
