"""Certificates for tests, made with the openssl command."""

from __future__ import annotations

import shutil
import subprocess

import pytest


def _openssl(*args):
    subprocess.run(["openssl", *map(str, args)], check=True, capture_output=True)


class Authority:
    """An authority in `folder`: `ca` is its certificate; `member` makes a file with a key and its certificate."""

    def __init__(self, folder, name):
        if shutil.which("openssl") is None:
            pytest.skip("needs the openssl command")
        folder.mkdir()
        self.folder, self.ca, self.key = folder, folder / "ca.crt", folder / "ca.key"
        subject = ["-subj", f"/CN={name}"]
        _openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", 30,
                 "-keyout", self.key, "-out", self.ca, *subject)  # fmt: skip

    def member(self, name="host", expired=False):
        key, request, out = (self.folder / f"{name}.{end}" for end in ("key", "csr", "pem"))
        _openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                 "-keyout", key, "-out", request, "-subj", f"/CN={name}")  # fmt: skip
        crt = self.folder / f"{name}.crt"
        if expired:
            (self.folder / "index").write_text("")
            (self.folder / "serial").write_text("01")
            config = self.folder / "ca.conf"
            config.write_text(
                f"[ca]\ndefault_ca=d\n[d]\ndatabase={self.folder}/index\nserial={self.folder}/serial\n"
                f"new_certs_dir={self.folder}\ndefault_md=sha256\npolicy=p\n[p]\ncommonName=supplied\n"
            )
            _openssl("ca", "-batch", "-config", config, "-cert", self.ca, "-keyfile", self.key, "-in", request,
                     "-out", crt, "-notext", "-startdate", "200101000000Z", "-enddate", "200201000000Z")  # fmt: skip
        else:
            _openssl("x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", self.key, "-CAcreateserial",
                     "-days", 30, "-out", crt)  # fmt: skip
        out.write_bytes(key.read_bytes() + crt.read_bytes())
        return out
