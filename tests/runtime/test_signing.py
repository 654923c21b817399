"""Signed models: with `trusted`, a file is loaded only if one of these keys has signed it and no byte was changed."""

from __future__ import annotations

import hashlib
import os
import random
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.runtime import toys
from tilewright.errors import ArtifactError, MissingDependencyError, SignatureError, SigningKeyError
from tilewright.runtime import artifact, signing
from tilewright.runtime.artifact import HEADER_SIZE, load

SECRET, OTHER = b"s" * 32, b"o" * 32
X = np.random.default_rng(0).standard_normal((16, 32), dtype=np.float32)


def pair() -> tuple[bytes, bytes]:
    """(Private, public) Ed25519 key as PEM."""
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    from cryptography.hazmat.primitives import serialization

    key = ed25519.Ed25519PrivateKey.generate()
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return private, key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)


@pytest.fixture
def signed(tmp_path: Path) -> Path:
    path = tmp_path / "signed.tw"
    toys.chain(3).save(path, sign=SECRET)
    return path


def test_a_secret_that_both_sides_have(signed: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(SECRET)
    for trusted in (SECRET, key, str(key), [OTHER, SECRET]):
        np.testing.assert_array_equal(load(signed, trusted=trusted)(X), toys.chain(3)(X))
    assert load(signed)(X).shape == (16, 32)  # without `trusted`, it loads like any other
    with pytest.raises(SignatureError, match=r"not signed with a key that is trusted\n  try: get the file"):
        load(signed, trusted=OTHER)


def test_a_pair_of_keys(tmp_path: Path) -> None:
    private, public = pair()
    path = tmp_path / "signed.tw"
    toys.chain(3).save(path, sign=private)
    for trusted in (public, private, [SECRET, public]):
        np.testing.assert_array_equal(load(path, trusted=trusted)(X), toys.chain(3)(X))
    for trusted in (pair()[1], SECRET, public[:-30] + public[-30:].lower()):
        with pytest.raises((SignatureError, SigningKeyError)):
            load(path, trusted=trusted)
    with pytest.raises(SigningKeyError, match="a public key verifies"):
        toys.chain(3).save(tmp_path / "other.tw", sign=public)


def test_a_file_without_a_signature(tmp_path: Path) -> None:
    path = tmp_path / "plain.tw"
    toys.chain(3).save(path)
    with pytest.raises(SignatureError, match="is not signed"):
        load(path, trusted=SECRET)


def rehashed(data: bytearray) -> bytes:
    """With a checksum that fits again."""
    signed = int.from_bytes(data[72:76], "little")
    body = data[HEADER_SIZE : len(data) - signed] if signed < len(data) else data[HEADER_SIZE:]
    data[40:72] = hashlib.sha256(bytes(data[:40] + body)).digest()
    return bytes(data)


def test_every_byte_is_covered(signed: Path) -> None:
    original = signed.read_bytes()
    rng = random.Random(0)
    places = [*range(8, HEADER_SIZE), *range(len(original) - 40, len(original))]
    places += [rng.randrange(HEADER_SIZE, len(original)) for _ in range(200)]
    for place in places:
        data = bytearray(original)
        data[place] ^= 1 << rng.randrange(8)
        signed.write_bytes(data if 40 <= place < 72 else rehashed(data))
        with pytest.raises(ArtifactError):
            load(signed, trusted=SECRET)


def test_a_signature_of_another_file(signed: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.tw"
    toys.chain(4).save(other, sign=OTHER)
    data = other.read_bytes()
    other.write_bytes(data[: -signing.SIZES[1]] + signed.read_bytes()[-signing.SIZES[1] :])
    with pytest.raises(SignatureError):
        load(other, trusted=SECRET)


def test_a_signed_file_is_a_zip(signed: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(signed) as archive:
        assert archive.testzip() is None and len(archive.comment) == signing.SIZES[1]
    again = tmp_path / "again.tw"
    load(signed).save(again, sign=SECRET)
    assert again.read_bytes() == signed.read_bytes()


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (b"short", "at least 16"),
        ("/nonexistent/key", "cannot read the key"),
        ("/dev/zero", "it is a device"),
        (b"-----BEGIN PRIVATE KEY-----\nx\n-----END PRIVATE KEY-----\n", "holds no key"),
        (7, "must be bytes or the path"),
    ],
)
def test_what_is_no_key(key: object, said: str, tmp_path: Path) -> None:
    with pytest.raises(SigningKeyError, match=said):
        toys.chain(2).save(tmp_path / "x.tw", sign=key)  # type: ignore[arg-type]
    assert not os.listdir(tmp_path)


def test_no_key_at_all(signed: Path) -> None:
    with pytest.raises(SigningKeyError, match="no key is trusted"):
        load(signed, trusted=[])


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
    with pytest.raises(MissingDependencyError, match=r"tilewright\[sign\]"):
        toys.chain(2).save(tmp_path / "x.tw", sign=b"-----BEGIN PRIVATE KEY-----\n")


def test_signatures_lie_where_the_header_says(signed: Path) -> None:
    *_, count = artifact._HEADER.unpack(signed.read_bytes()[:HEADER_SIZE])
    assert count == signing.SIZES[1]
