"""The run's own certificate authority and what it signs: EC P-256 throughout.

Knows keys, certificates and two files. It must not know sockets, gRPC, tokens or who may join.
"""

from __future__ import annotations

import base64
import re
import ssl
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from protomodels_cli.errors import UserError
from protomodels_cli.files import write_whole
from protomodels_cli.quantities import size

COORDINATOR_NAME = "coordinator.pmtrain"
MAX_PEM = 16 * 1024  # of anything we parse; our own certificates have under 1 KiB
AUTHORITY_DAYS = 3650
LEAF_DAYS = 365
CLOCK_SKEW = timedelta(days=1)  # home machines' clocks are wrong by hours, seldom by a day
MOST_SKEW = 300.0  # seconds between the clocks of a peer and its coordinator; people who read logs have no day's grace
LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
Parsed = TypeVar("Parsed")


class AuthorityError(UserError):
    """The run's CA on disk is not as it should be."""


class InvalidPem(ValueError):
    """Bytes that are not the one key or certificate that they should be."""

    def __init__(self, what: str, *, kind: str):
        super().__init__(what)
        self.kind = kind


class InvalidName(ValueError):
    """A name that no certificate of ours may have."""


@dataclass(frozen=True)
class Identity:
    """What one side of a TLS connection needs: its key, its certificate, and whom it trusts. All PEM."""

    key_pem: bytes = field(repr=False)
    certificate_pem: bytes
    authority_pem: bytes


@dataclass(frozen=True)
class Authority:
    """The run CA. Whoever holds its key decides who is a peer."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(repr=False)

    @property
    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(self.certificate_pem)

    def issue(self, name: str, public_key_pem: bytes, until: float | None = None) -> bytes:
        """A certificate for this name and key, good for serving and for dialling. Never outlives the CA. `until`: in
        seconds since 1970; None: for a year."""
        labels = name.split(".")
        if len(name) > 64 or not all(LABEL.fullmatch(label) for label in labels):  # 64: what a common name may have
            raise InvalidName(f"{name[:80]!r} cannot be the name of a certificate")
        public = checked_key(public_key_pem)
        wanted = datetime.now(UTC) + timedelta(days=LEAF_DAYS) if until is None else datetime.fromtimestamp(until, UTC)
        end = min(wanted, self.certificate.not_valid_after_utc)
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        uses = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = (
            _builder(name, self.certificate.subject, public, end)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(uses, critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(signer, critical=False)
        )
        return builder.sign(self.key, hashes.SHA256()).public_bytes(Encoding.PEM)

    def issue_with_key(self, name: str) -> Identity:
        key = new_key()
        return Identity(key, self.issue(name, public_key_of(key)), self.certificate_pem)

    def save(self, folder: Path) -> None:
        """Write ca.key, then ca.pem: where ca.pem is, the authority is whole. Never replaces one."""
        if (folder / "ca.pem").exists():
            fix = "keep that CA: a new one would lock every peer out of the run"
            raise AuthorityError(f"{folder} already has the run's CA", fix, kind="authority_exists")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(folder / "ca.key", _private_pem(self.key), mode=0o600)
        write_whole(folder / "ca.pem", self.certificate_pem)

    @classmethod
    def load(cls, folder: Path) -> Authority:
        certificate = _load(folder / "ca.pem", _certificate)
        key = _load(folder / "ca.key", _private_key)
        if key.public_key() != certificate.public_key():
            raise _unusable(folder, "ca.key is not the key of ca.pem", "authority_key_mismatch")
        return cls(certificate, key)


def new_authority() -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "pmtrain run CA")])
    builder = (
        _builder("pmtrain run CA", name, key.public_key(), datetime.now(UTC) + timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
    )
    return Authority(builder.sign(key, hashes.SHA256()), key)


def new_key() -> bytes:
    return _private_pem(ec.generate_private_key(ec.SECP256R1()))


def public_key_of(key_pem: bytes) -> bytes:
    return _private_key(key_pem).public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def checked_key(public_key_pem: bytes) -> ec.EllipticCurvePublicKey:
    """Of those that an authority signs. Raises InvalidPem."""
    public = _parse("a public key", public_key_pem, serialization.load_pem_public_key)
    if not isinstance(public, ec.EllipticCurvePublicKey) or not isinstance(public.curve, ec.SECP256R1):
        raise InvalidPem("not a P-256 public key", kind="not_p256")
    return public


def fingerprint_of(certificate_pem: bytes) -> str:
    """SHA-256 of the certificate's DER, base64url without padding: 43 characters."""
    digest = _certificate(certificate_pem).fingerprint(hashes.SHA256())
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def one_certificate(pem: bytes) -> bytes:
    """The single certificate in `pem` and nothing else.

    gRPC trusts every certificate in the roots it is given, but a fingerprint vouches for one: any other must never
    reach gRPC.
    """
    return _certificate(pem).public_bytes(Encoding.PEM)


def life_of(certificate_pem: bytes) -> float:
    """Seconds from its issue to its end, both by the clock of whoever issued it."""
    certificate = _certificate(certificate_pem)
    issued = certificate.not_valid_before_utc + CLOCK_SKEW
    return (certificate.not_valid_after_utc - issued).total_seconds()


def peer_name(peer_id: str) -> str:
    if not LABEL.fullmatch(peer_id):
        raise InvalidName(f"peer id {peer_id[:80]!r} may have lower-case letters, digits and inner hyphens only")
    return f"{peer_id}.peer.pmtrain"


def _builder(name: str, issuer: x509.Name, key: ec.EllipticCurvePublicKey, end: datetime) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - CLOCK_SKEW)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _key_usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _certificate(pem: bytes) -> x509.Certificate:
    found = _parse("a certificate", pem, x509.load_pem_x509_certificates)
    if len(found) != 1:
        raise InvalidPem(f"not one certificate but {len(found)}", kind="several_certificates")
    return found[0]


def _private_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    key = _parse("a private key", pem, lambda text: serialization.load_pem_private_key(text, password=None))
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise InvalidPem("not a P-256 private key", kind="not_p256")
    return key


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _parse(what: str, pem: bytes, parse: Callable[[bytes], Parsed]) -> Parsed:
    if len(pem) > MAX_PEM:
        raise InvalidPem(f"{what} has {size(MAX_PEM)} at most, and this file has more", kind="too_large")
    try:
        return parse(pem)
    except Exception as error:  # the parsers raise half a dozen types; callers need to know one
        raise InvalidPem(f"not {what} in PEM form", kind="not_pem") from error


def _load(path: Path, parse: Callable[[bytes], Parsed]) -> Parsed:
    try:
        with path.open("rb") as file:
            return parse(file.read(MAX_PEM + 1))
    except OSError as error:
        raise _unusable(path.parent, f"{path.name}: {error.strerror}", "authority_unreadable") from None
    except InvalidPem as error:
        raise _unusable(path.parent, f"{path.name}: {error}", "authority_damaged") from None


def _unusable(folder: Path, why: str, kind: str) -> AuthorityError:
    fix = "restore ca.pem and ca.key from a copy; without them the peers of this run cannot come back"
    return AuthorityError(f"cannot use the run's CA in {folder}: {why}", fix, kind=kind)


def client_context(identity: Identity) -> ssl.SSLContext:
    """For dialling a peer outside gRPC: shows our certificate, trusts the run's authority alone.

    It leaves the name to the caller: peers are not known by their hosts."""
    context = ssl.create_default_context(cadata=identity.authority_pem.decode())
    context.check_hostname = False
    with tempfile.NamedTemporaryFile() as file:  # mode 600; `ssl` takes a certificate from a file only
        file.write(identity.key_pem + identity.certificate_pem)
        file.flush()
        context.load_cert_chain(file.name)
    return context


def server_context(identity: Identity) -> ssl.SSLContext:
    """For answering the coordinator, which dials a peer to see whether its neighbours could."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile() as file:
        file.write(identity.key_pem + identity.certificate_pem)
        file.flush()
        context.load_cert_chain(file.name)
    return context
