"""The run's certificate authority: what it keeps, what it certifies, and what it makes of garbage."""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import ssl
import stat
import time
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from protomodels_cli.errors import EXIT_OUTSIDE
from protomodels_cli.wire import tls


def test_the_authority_is_kept_and_its_key_is_nobody_elses(authority, tmp_path, monkeypatch):
    seen, at_first = {}, []

    def watched_replace(source, target, replace=os.replace):
        seen[Path(target).name] = stat.S_IMODE(os.stat(source).st_mode)
        replace(source, target)

    def watched_open(name, flags, mode=0o777, open=os.open):
        handle = open(name, flags, mode)
        if flags & os.O_CREAT:
            at_first.append(stat.S_IMODE(os.fstat(handle).st_mode))
        return handle

    monkeypatch.setattr(os, "replace", watched_replace)
    monkeypatch.setattr(os, "open", watched_open)
    before = os.umask(0)  # the least careful user
    try:
        authority.save(tmp_path / "run" / "ca")
    finally:
        os.umask(before)
    folder = tmp_path / "run" / "ca"
    assert seen == {"ca.key": 0o600, "ca.pem": 0o644}
    assert at_first == [0o600, 0o644]  # not even between being made and being written
    assert list(seen) == ["ca.key", "ca.pem"]  # where the certificate is, the key is
    assert stat.S_IMODE((folder / "ca.key").stat().st_mode) == 0o600
    assert sorted(path.name for path in folder.iterdir()) == ["ca.key", "ca.pem"]
    loaded = tls.Authority.load(folder)
    digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert((folder / "ca.pem").read_text())).digest()
    assert loaded.fingerprint == authority.fingerprint == base64.urlsafe_b64encode(digest).decode().rstrip("=")
    loaded.issue_with_key("x.pmtrain")
    with pytest.raises(tls.AuthorityError, match=str(folder)) as exists:
        tls.new_authority().save(folder)
    assert exists.value.kind == "authority_exists"


def test_a_damaged_authority_is_refused(authority, tmp_path):
    def refused() -> str:
        with pytest.raises(tls.AuthorityError, match=str(tmp_path)) as error:
            tls.Authority.load(tmp_path)
        assert error.value.exit_code == EXIT_OUTSIDE
        return error.value.kind

    assert refused() == "authority_unreadable"
    authority.save(tmp_path)
    (tmp_path / "ca.key").write_bytes(tls.new_key())
    assert refused() == "authority_key_mismatch"
    (tmp_path / "ca.key").write_bytes(b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
    assert refused() == "authority_damaged"


def test_a_leaf_says_what_it_is_for(authority, monkeypatch):
    name = tls.peer_name("peer-7")
    leaf = x509.load_pem_x509_certificate(authority.issue(name, tls.public_key_of(tls.new_key())))
    leaf.verify_directly_issued_by(authority.certificate)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["peer-7.peer.pmtrain"]
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert (leaf.not_valid_after_utc - leaf.not_valid_before_utc).days in (tls.LEAF_DAYS, tls.LEAF_DAYS + 1)
    assert time.time() - leaf.not_valid_before_utc.timestamp() == pytest.approx(86400, abs=60)
    assert tls.life_of(leaf.public_bytes(Encoding.PEM)) == pytest.approx(tls.LEAF_DAYS * 86400, abs=2)
    monkeypatch.setattr(tls, "LEAF_DAYS", 99_999)
    forever = x509.load_pem_x509_certificate(authority.issue(name, tls.public_key_of(tls.new_key())))
    assert forever.not_valid_after_utc == authority.certificate.not_valid_after_utc


@pytest.mark.parametrize("name", ["", "*.peer.pmtrain", "a b", "a..b", "-a", "a\n", "Ä", "a" * 65, "a.pmtrain\x00.b"])
def test_names_that_mean_more_than_one_thing_are_not_certified(authority, name):
    with pytest.raises(tls.InvalidName):
        authority.issue(name, tls.public_key_of(tls.new_key()))
    with pytest.raises(tls.InvalidName):
        tls.peer_name(name)
    with pytest.raises(tls.InvalidName):
        tls.peer_name("x.coordinator")


def test_only_p256_keys_are_certified(authority):
    for key in (ec.generate_private_key(ec.SECP384R1()), rsa.generate_private_key(65537, 2048)):
        pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        with pytest.raises(tls.InvalidPem) as error:
            authority.issue("a.pmtrain", pem)
        assert error.value.kind == "not_p256"


def pem_block(label: str, body: str) -> bytes:
    return f"-----BEGIN {label}-----\n{body}\n-----END {label}-----\n".encode()


LABELS = ["CERTIFICATE", "PUBLIC KEY", "PRIVATE KEY", "EC PRIVATE KEY", "ENCRYPTED PRIVATE KEY", "RSA PUBLIC KEY"]


@given(
    st.one_of(
        st.binary(max_size=200), st.builds(pem_block, st.sampled_from(LABELS), st.text("AMIGBCb3/+=\n", max_size=99))
    )
)
def test_garbage_in_place_of_pem_is_invalid(garbage):
    authority = garbage_authority()
    for parse in (tls.fingerprint_of, tls.one_certificate, tls.public_key_of, lambda pem: authority.issue("a", pem)):
        with pytest.raises(tls.InvalidPem) as error:
            parse(garbage)
        assert error.value.kind in ("not_pem", "not_p256", "several_certificates")


garbage_authority = functools.cache(tls.new_authority)


def test_pem_has_a_limit(authority):
    for parse in (tls.fingerprint_of, tls.public_key_of, lambda pem: authority.issue("a", pem)):
        with pytest.raises(tls.InvalidPem) as error:
            parse(authority.certificate_pem + b"\n" * 20_000)
        assert error.value.kind == "too_large"
