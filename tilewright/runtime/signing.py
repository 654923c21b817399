"""Sign artifacts, and verify who wrote them.

A key is a secret that writer and reader share (HMAC-SHA256, from the standard library), or a pair of keys of which
the writer has the private one (Ed25519, with the `cryptography` package). A key is given as bytes or as the path of a
file: a PEM text is an Ed25519 key, anything else a secret. The signature covers the file's header and the digest of
everything else.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from tilewright.errors import MissingDependencyError, SignatureError, SigningKeyError
from tilewright.support.files import read_regular

Key = bytes | str | os.PathLike[str]

_DOMAIN = b"tilewright artifact 1\0"
_PEM = b"-----BEGIN"
_MIN_BYTES, _MAX_BYTES = 16, 1 << 16  # of a secret: shorter ones can be guessed
_HMAC, _ED25519 = 1, 2  # kinds, as stored in the file
SIZES = {_HMAC: 1 + 32, _ED25519: 1 + 64}  # bytes of a signature with its kind


class Signer(Protocol):
    size: int  # bytes of a signature

    def sign(self, message: bytes) -> bytes: ...

    def verifies(self, message: bytes, signature: bytes) -> bool: ...


class _Secret:
    size = SIZES[_HMAC]

    def __init__(self, secret: bytes) -> None:
        if len(secret) < _MIN_BYTES:
            raise SigningKeyError(f"a secret of {len(secret)} bytes; it must have at least {_MIN_BYTES}")
        self._secret = secret

    def sign(self, message: bytes) -> bytes:
        return bytes([_HMAC]) + hmac.new(self._secret, _DOMAIN + message, hashlib.sha256).digest()

    def verifies(self, message: bytes, signature: bytes) -> bool:
        return hmac.compare_digest(self.sign(message), signature)


class _Pair:
    """The private key of an Ed25519 pair, or the public one, which only verifies."""

    size = SIZES[_ED25519]

    def __init__(self, text: bytes) -> None:
        try:
            from cryptography.hazmat.primitives.asymmetric import ed25519
            from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key
        except ImportError:
            raise MissingDependencyError(
                "an Ed25519 key needs the cryptography package", remedy="pip install 'tilewright[sign]'"
            ) from None
        try:
            is_private = b"PRIVATE KEY" in text
            key: Any = load_pem_private_key(text, password=None) if is_private else load_pem_public_key(text)
        except Exception as error:  # of many classes, depending on the text
            raise SigningKeyError(f"a PEM text that holds no key: {error}") from None
        if not isinstance(key, (ed25519.Ed25519PrivateKey, ed25519.Ed25519PublicKey)):
            raise SigningKeyError(f"a {type(key).__name__}; it must be an Ed25519 key")
        self._private: Any = key if is_private else None
        self._public: Any = key.public_key() if isinstance(key, ed25519.Ed25519PrivateKey) else key

    def sign(self, message: bytes) -> bytes:
        if self._private is None:
            raise SigningKeyError(
                "a public key verifies, and does not sign", remedy="sign with the private key"
            )
        return bytes([_ED25519]) + bytes(self._private.sign(_DOMAIN + message))

    def verifies(self, message: bytes, signature: bytes) -> bool:
        from cryptography.exceptions import InvalidSignature

        try:
            self._public.verify(signature[1:], _DOMAIN + message)
        except InvalidSignature:
            return False
        return signature[:1] == bytes([_ED25519])


def signer(key: Key) -> Signer:
    """An object that signs or verifies with a key. Raises SigningKeyError if it is not a key."""
    if not isinstance(key, bytes):
        try:
            path = os.fspath(key)
            key = read_regular(path, _MAX_BYTES)
        except OSError as error:
            raise SigningKeyError(f"cannot read the key {path}: {error.strerror or error}") from None
        except TypeError:
            raise SigningKeyError(
                f"a key must be bytes or the path of a file, got {type(key).__name__}"
            ) from None
    return _Pair(key) if key.lstrip().startswith(_PEM) else _Secret(key)


def signers(keys: Key | Iterable[Key]) -> Sequence[Signer]:
    several: Iterable[Key] = [keys] if isinstance(keys, (bytes, str, os.PathLike)) else keys
    found = [signer(key) for key in several]
    if not found:
        raise SigningKeyError("no key is trusted", remedy="pass at least one, or leave `trusted` out")
    return found


def verify(place: str, message: bytes, signature: bytes, trusted: Sequence[Signer]) -> None:
    """Raise SignatureError unless one of the trusted keys has signed the message."""
    if not signature:
        raise SignatureError(f"{place} is not signed")
    if not any(key.size == len(signature) and key.verifies(message, signature) for key in trusted):
        raise SignatureError(f"{place} is not signed with a key that is trusted")
