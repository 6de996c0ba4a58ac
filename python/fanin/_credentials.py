# SPDX-License-Identifier: Apache-2.0
"""A launch's secret or a certificate, as configurations name it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

__all__ = ["VARIABLES", "Credentials"]

VARIABLES = {
    "secret_file": "FANIN_SECRET_FILE",
    "tls_cert": "FANIN_TLS_CERT",
    "tls_key": "FANIN_TLS_KEY",
    "tls_ca": "FANIN_TLS_CA",
}
"""The fields of :class:`Credentials` and their variables, which libfanin reads, too."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Paths of a secret, or of a certificate, its key and the other end's authorities; None: not
    said. See fanin.Server and fanin.Client. Immutable."""

    secret_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None

    @property
    def kind(self) -> str | None:
        """What they are: "a secret", "a certificate"; None: nothing."""
        if self.secret_file is not None:
            return "a secret"
        return None if self.tls_cert is None else "a certificate"

    def arguments(self) -> dict[str, str]:
        """Those that are said, as keyword arguments of fanin.Server and fanin.Client."""
        return {name: path for name, path in asdict(self).items() if path is not None}
