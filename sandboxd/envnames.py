"""Names of a sandbox's environment variables: what one is, and those that nobody sets. A leaf, so that the command line
says early what the server would refuse."""

from __future__ import annotations

import re

ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
RESERVED_ENV = frozenset(
    {
        "SANDBOX_RUN_AS", "SANDBOX_EGRESS_ALLOW", "SANDBOX_INGRESS_PORTS", "SANDBOX_PROXY_PORT",
        "SANDBOX_UMASK", "BASH_ENV", "ENV", "LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", "SHELLOPTS",
        "BASHOPTS", "PS4", "IFS", "GLOBIGNORE", "DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_CERT_PATH",
        "DOCKER_TLS_VERIFY", "DOCKER_CONTEXT",
    }
)  # fmt: skip
