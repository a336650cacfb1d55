"""Who may import whom. The table is the architecture: an arrow that is not in it fails here.

Read from the sources, not from `sys.modules`, so that an import inside a function counts too.
"""

from __future__ import annotations

import ast
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("native", "sandboxd", "guestd", "egress", "cli", "conformance")

# module pattern → (ours, third party); the first pattern that fits is the rule.
TABLE: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
    # It knows the specification and nothing of ours, so that it can be held against any server.
    ("conformance*", ("conformance*",), ("pytest",)),
    ("guestd*", ("guestd*",), ()),
    ("native.build", (), ("cffi",)),
    ("native", ("native._native",), ()),
    ("native.relay", ("native._native",), ()),
    # egress. The daemon's half has the privilege and never sees a guest's byte:
    ("egress.plan", (), ()),
    ("egress.ruleset", ("egress.plan", "egress.policy"), ()),
    ("egress.nft", ("egress.plan",), ()),
    ("egress.link", ("egress.plan",), ("pyroute2",)),
    ("egress.session", ("egress.control", "egress.policy"), ("anyio",)),
    ("egress.supervisor", ("egress.control", "egress.session"), ("anyio",)),
    (
        "egress.network",
        (
            "egress.plan", "egress.policy", "egress.ruleset", "egress.nft", "egress.link", "egress.control",
            "egress.session", "egress.supervisor",
        ),
        ("anyio",),
    ),
    # The two processes' own leaves, and what gives up their power.
    ("egress.control", (), ()),
    ("egress.log", (), ()),
    ("egress.local", (), ()),
    ("egress.lookup", (), ()),
    ("egress.turns", (), ()),
    ("egress.loop", ("egress.log",), ()),
    ("egress.confine", (), ("prctl", "pyseccomp")),
    ("egress.resolver", ("egress.confine", "egress.policy"), ()),
    # What decides: pure.
    ("egress.policy", (), ("idna",)),
    ("egress.vet", (), ()),
    ("egress.names", ("egress.policy",), ()),
    ("egress.tls", ("egress.policy",), ()),
    ("egress.http1", ("egress.policy",), ()),
    ("egress.command", ("egress.policy",), ()),
    ("egress.stream", ("egress.command", "egress.http1"), ()),
    (
        "egress.flow",
        ("egress.command", "egress.http1", "egress.policy", "egress.stream", "egress.tls"),
        (),
    ),
    ("egress.dns", ("egress.policy",), ("dnslib",)),
    ("egress.ledger", ("egress.control",), ()),
    # The process that reads the guest's bytes: all of the above but the daemon's half.
    ("egress.answer", ("egress.dns", "egress.loop"), ()),
    ("egress.sandbox", ("egress.answer", "egress.flow", "egress.lookup", "egress.names", "egress.policy"), ()),
    (
        "egress.questions",
        (
            "egress.answer", "egress.dns", "egress.ledger", "egress.lookup", "egress.names", "egress.policy",
            "egress.sandbox",
        ),
        (),
    ),
    (
        "egress.proxy",
        (
            "egress.answer", "egress.flow", "egress.ledger", "egress.local", "egress.log", "egress.lookup",
            "egress.loop", "egress.policy", "egress.questions", "egress.sandbox", "egress.turns", "egress.vet",
            "native.relay",
        ),
        (),
    ),
    (
        "egress.serve",
        (
            "egress.control", "egress.ledger", "egress.log", "egress.loop", "egress.policy", "egress.proxy",
            "native.relay",
        ),
        (),
    ),
    (
        "egress.__main__",
        (
            "egress.confine", "egress.ledger", "egress.local", "egress.log", "egress.lookup", "egress.loop",
            "egress.proxy", "egress.serve", "native.relay",
        ),
        (),
    ),
    # Leaves: the command line and the daemon both stand on them.
    ("sandboxd.errors", (), ()),
    ("sandboxd.unixhttp", (), ()),
    ("sandboxd.unixpath", (), ()),
    ("sandboxd.termsafe", (), ()),
    ("sandboxd.envnames", (), ()),
    ("sandboxd.plain_yaml", ("sandboxd.errors", "sandboxd.termsafe"), ("yaml",)),
    ("sandboxd.lifecycle", (), ()),
    ("sandboxd.notify", ("sandboxd.termsafe",), ()),
    ("sandboxd.trees", (), ()),
    ("sandboxd.ext4", ("sandboxd.errors", "sandboxd.termsafe"), ("anyio",)),
    ("sandboxd.spool", ("sandboxd.trees", "sandboxd.unixpath"), ()),
    ("sandboxd.answers", ("sandboxd.errors",), ()),
    ("sandboxd.streams", ("sandboxd.answers", "sandboxd.unixhttp"), ()),
    ("sandboxd.tlsclient", (), ()),
    ("sandboxd.endpoint", ("sandboxd.errors", "sandboxd.tlsclient", "sandboxd.unixhttp"), ()),
    (
        "sandboxd.client",
        ("sandboxd.answers", "sandboxd.endpoint", "sandboxd.errors", "sandboxd.streams", "sandboxd.unixhttp"),
        (),
    ),
    ("sandboxd.address", ("sandboxd.errors",), ()),
    ("sandboxd.transport", ("sandboxd.address", "sandboxd.errors"), ()),
    (
        "sandboxd.settings",
        ("sandboxd.address", "sandboxd.errors", "sandboxd.fields", "sandboxd.transport"),
        (),
    ),
    ("sandboxd.credentials", ("sandboxd.errors", "sandboxd.transport"), ()),
    ("sandboxd.listening", ("sandboxd.address", "sandboxd.errors", "sandboxd.unixpath"), ()),
    ("sandboxd.limits", (), ()),
    ("sandboxd.occupancy", ("sandboxd.address", "sandboxd.limits"), ()),
    ("sandboxd.uids", ("sandboxd.errors",), ()),
    ("sandboxd.wire", ("sandboxd.errors",), ("msgspec",)),
    ("sandboxd.store", ("sandboxd.errors", "sandboxd.lifecycle"), ("msgspec",)),
    ("sandboxd.volumes", ("sandboxd.errors", "sandboxd.ext4", "sandboxd.store"), ("anyio",)),
    ("sandboxd.skew", ("guestd.protocol",), ()),
    (
        "sandboxd.fields",
        ("sandboxd.envnames", "sandboxd.errors", "sandboxd.store", "sandboxd.wire", "egress.policy"),
        (),
    ),
    (
        "sandboxd.policy",
        (
            "sandboxd.errors", "sandboxd.fields", "sandboxd.store", "sandboxd.wire", "sandboxd.assets.reference",
            "egress.policy",
        ),
        (),
    ),
    # The one part of the daemon's that looks at a path a request names.
    (
        "sandboxd.bind",
        ("sandboxd.address", "sandboxd.errors", "sandboxd.settings", "native"),
        (),
    ),
    ("sandboxd.registries", ("sandboxd.errors", "egress.policy"), ()),
    (
        "sandboxd.policy_file",
        (
            "sandboxd.errors", "sandboxd.fields", "sandboxd.plain_yaml", "sandboxd.policy", "sandboxd.store",
            "sandboxd.vm.machine", "egress.policy",
        ),
        (),
    ),
    ("sandboxd.node", ("sandboxd.errors",), ()),
    ("sandboxd.usage", ("sandboxd.vm.machine",), ()),
    (
        "sandboxd.pools",
        (
            "sandboxd.errors", "sandboxd.policy", "sandboxd.store", "sandboxd.termsafe", "sandboxd.uids",
            "sandboxd.vm.machine",
        ),
        ("anyio",),
    ),
    (
        "sandboxd.prometheus",
        ("sandboxd.address", "sandboxd.errors", "sandboxd.guard", "sandboxd.node", "sandboxd.service"),
        ("anyio", "h11", "prometheus_client"),
    ),
    # The audit log: its files can be checked without a daemon.
    ("sandboxd.chain", (), ()),
    ("sandboxd.generations", ("sandboxd.chain",), ()),
    ("sandboxd.journal", ("sandboxd.chain", "sandboxd.errors", "sandboxd.generations"), ()),
    (
        "sandboxd.history",
        ("sandboxd.chain", "sandboxd.events", "sandboxd.generations", "sandboxd.wire"),
        ("msgspec",),
    ),
    (
        "sandboxd.audit",
        (
            "sandboxd.chain", "sandboxd.errors", "sandboxd.generations", "sandboxd.history", "sandboxd.journal",
            "sandboxd.wire",
        ),
        ("anyio", "msgspec"),
    ),
    ("sandboxd.events", ("sandboxd.errors", "egress.control"), ()),
    (
        "sandboxd.networks",
        (
            "sandboxd.errors", "sandboxd.events", "sandboxd.policy", "sandboxd.store", "sandboxd.termsafe",
            "sandboxd.usage", "egress.network", "egress.policy",
        ),
        ("anyio",),
    ),
    # Run in a jail, without the rest of the package.
    ("sandboxd.assets.layers", (), ()),
    ("sandboxd.assets.roots", (), ()),
    ("sandboxd.assets.confined", ("sandboxd.assets.rootspace",), ("anyio",)),
    ("sandboxd.assets.oci", ("sandboxd.errors", "sandboxd.assets.*"), ("anyio", "msgspec")),
    (
        "sandboxd.images",
        (
            "sandboxd.errors", "sandboxd.termsafe", "sandboxd.assets.confined", "sandboxd.assets.manifest",
            "sandboxd.assets.oci", "sandboxd.assets.reference",
        ),
        ("anyio", "msgspec"),
    ),
    ("sandboxd.assets.*", ("sandboxd.errors", "sandboxd.trees", "sandboxd.assets.*"), ()),
    ("sandboxd.vm.qmp", (), ()),
    # A test's stand-in for the VMM answers by it.
    ("sandboxd.vm.firecracker_calls", (), ()),
    ("sandboxd.vm.firecracker_versions", (), ()),
    ("sandboxd.vm.firecracker_client", ("sandboxd.vm.*", "sandboxd.termsafe", "sandboxd.unixpath"), ("anyio", "h11")),
    (
        "sandboxd.vm.*",
        ("sandboxd.vm.*", "sandboxd.errors", "sandboxd.trees", "sandboxd.unixpath", "native"),
        ("anyio",),
    ),
    ("sandboxd.socketstream", ("sandboxd.unixpath",), ("anyio",)),
    ("sandboxd.tlsstream", ("sandboxd.socketstream",), ("anyio",)),
    (
        "sandboxd.guest",
        ("sandboxd.errors", "sandboxd.skew", "sandboxd.socketstream", "sandboxd.store", "guestd.protocol"),
        ("anyio",),
    ),
    ("sandboxd.heartbeat", ("sandboxd.errors", "sandboxd.guest"), ("anyio",)),
    (
        "sandboxd.processes",
        (
            "sandboxd.audit", "sandboxd.errors", "sandboxd.guest", "sandboxd.spool", "sandboxd.store",
            "sandboxd.trees", "guestd.protocol",
        ),
        ("anyio",),
    ),
    ("sandboxd.attach", ("sandboxd.errors", "sandboxd.processes", "sandboxd.spool", "guestd.protocol"), ("anyio",)),
    # serve → connection → api → service, each the next one.
    (
        "sandboxd.serve",
        (
            "sandboxd.address", "sandboxd.connection", "sandboxd.credentials", "sandboxd.errors", "sandboxd.http1",
            "sandboxd.limits", "sandboxd.listening", "sandboxd.occupancy", "sandboxd.routes.reply", "sandboxd.service",
            "sandboxd.socketstream", "sandboxd.tlsstream",
        ),
        ("anyio",),
    ),
    (
        "sandboxd.connection",
        (
            "sandboxd.api", "sandboxd.credentials", "sandboxd.errors", "sandboxd.guard", "sandboxd.http1",
            "sandboxd.limits", "sandboxd.occupancy", "sandboxd.routes.reply", "sandboxd.routes.table",
            "sandboxd.service",
        ),
        ("h11", "anyio"),
    ),
    (
        "sandboxd.http1",
        ("sandboxd.address", "sandboxd.limits", "sandboxd.routes.reply", "sandboxd.socketstream"),
        ("h11", "anyio"),
    ),
    ("sandboxd.guard", ("sandboxd.credentials", "sandboxd.errors", "sandboxd.routes.table"), ()),
    (
        "sandboxd.api",
        ("sandboxd.service", "sandboxd.routes.*", "sandboxd.wire", "sandboxd.errors"),
        (),
    ),
    ("sandboxd.openapi", ("sandboxd.routes.table", "sandboxd.wire"), ("msgspec",)),
    ("sandboxd.reference", ("sandboxd.openapi", "sandboxd.routes.table"), ()),
    ("sandboxd.routes.table", ("sandboxd.errors", "sandboxd.wire"), ()),
    (
        "sandboxd.routes.*",
        (
            "sandboxd.address", "sandboxd.service", "sandboxd.attach", "sandboxd.events", "sandboxd.fields",
            "sandboxd.guest",
            "sandboxd.images", "sandboxd.lifecycle", "sandboxd.node", "sandboxd.openapi", "sandboxd.policy",
            "sandboxd.processes", "sandboxd.routes.reply", "sandboxd.routes.sandboxes", "sandboxd.routes.table",
            "sandboxd.spool", "sandboxd.store", "sandboxd.usage", "sandboxd.wire", "sandboxd.errors",
        ),
        ("anyio",),
    ),
    (
        "sandboxd.service",
        (
            "sandboxd.address", "sandboxd.audit", "sandboxd.bind", "sandboxd.boot", "sandboxd.chain",
            "sandboxd.changes", "sandboxd.ending", "sandboxd.errors", "sandboxd.events", "sandboxd.fields",
            "sandboxd.guest", "sandboxd.history", "sandboxd.images", "sandboxd.lifecycle", "sandboxd.networks",
            "sandboxd.node", "sandboxd.places", "sandboxd.policy", "sandboxd.pools", "sandboxd.processes",
            "sandboxd.readiness", "sandboxd.restart", "sandboxd.sandboxes", "sandboxd.store", "sandboxd.supervision",
            "sandboxd.uids", "sandboxd.usage", "sandboxd.volumes", "sandboxd.wire", "sandboxd.assets.prepare",
            "sandboxd.vm.machine", "guestd.protocol",
        ),
        ("anyio",),
    ),
    # What the service stands on, each on those before it.
    ("sandboxd.places", ("sandboxd.errors", "sandboxd.unixpath"), ()),
    (
        "sandboxd.readiness",
        (
            "sandboxd.errors", "sandboxd.images", "sandboxd.notify", "sandboxd.policy", "sandboxd.termsafe",
            "sandboxd.uids", "sandboxd.assets.prepare",
        ),
        ("anyio",),
    ),
    (
        "sandboxd.sandboxes",
        (
            "sandboxd.audit", "sandboxd.errors", "sandboxd.guest", "sandboxd.heartbeat", "sandboxd.lifecycle",
            "sandboxd.places", "sandboxd.pools", "sandboxd.processes", "sandboxd.store", "sandboxd.termsafe",
            "sandboxd.uids", "sandboxd.usage", "sandboxd.volumes", "sandboxd.vm.machine",
        ),
        ("anyio",),
    ),
    (
        "sandboxd.boot",
        (
            "sandboxd.errors", "sandboxd.ext4", "sandboxd.guest", "sandboxd.images", "sandboxd.lifecycle",
            "sandboxd.networks", "sandboxd.node", "sandboxd.places", "sandboxd.policy", "sandboxd.pools",
            "sandboxd.readiness", "sandboxd.sandboxes", "sandboxd.store", "sandboxd.termsafe", "sandboxd.trees",
            "sandboxd.uids", "sandboxd.volumes", "sandboxd.assets.prepare", "sandboxd.vm.machine", "guestd.protocol",
        ),
        ("anyio",),
    ),
    (
        "sandboxd.changes",
        (
            "sandboxd.audit", "sandboxd.errors", "sandboxd.fields", "sandboxd.lifecycle", "sandboxd.networks",
            "sandboxd.policy", "sandboxd.sandboxes", "sandboxd.store", "sandboxd.wire",
        ),
        ("anyio",),
    ),
    (
        "sandboxd.ending",
        (
            "sandboxd.audit", "sandboxd.errors", "sandboxd.guest", "sandboxd.lifecycle", "sandboxd.networks",
            "sandboxd.places", "sandboxd.sandboxes", "sandboxd.store", "sandboxd.trees", "sandboxd.vm.machine",
        ),
        ("anyio",),
    ),
    (
        "sandboxd.supervision",
        (
            "sandboxd.audit", "sandboxd.boot", "sandboxd.ending", "sandboxd.lifecycle", "sandboxd.networks",
            "sandboxd.sandboxes", "sandboxd.store", "sandboxd.usage",
        ),
        ("anyio",),
    ),
    (
        "sandboxd.restart",
        (
            "sandboxd.audit", "sandboxd.boot", "sandboxd.ending", "sandboxd.errors", "sandboxd.guest",
            "sandboxd.lifecycle", "sandboxd.networks", "sandboxd.places", "sandboxd.sandboxes", "sandboxd.store",
            "sandboxd.supervision", "sandboxd.termsafe", "sandboxd.trees", "sandboxd.uids", "sandboxd.vm.machine",
            "guestd.protocol",
        ),
        ("anyio", "msgspec"),
    ),
    # The two places where the parts are made and joined.
    (
        "sandboxd.backends",
        ("sandboxd.vm.*", "sandboxd.errors", "sandboxd.assets.prepare", "native"),
        ("anyio",),
    ),
    (
        "sandboxd.assembly",
        ("sandboxd.*", "sandboxd.vm.*", "sandboxd.assets.*", "egress.network", "egress.control", "native"),
        ("anyio",),
    ),
    ("sandboxd.__main__", ("sandboxd.*", "sandboxd.assets.prepare", "sandboxd.vm.arch"), ("anyio", "docopt")),
    (
        "cli.audit",
        ("cli.*", "sandboxd.chain", "sandboxd.client", "sandboxd.errors", "sandboxd.generations", "sandboxd.termsafe"),
        (),
    ),
    # Tries the files of an address before it keeps their names.
    (
        "cli.context_command",
        ("cli.*", "sandboxd.endpoint", "sandboxd.errors", "sandboxd.termsafe", "sandboxd.tlsclient"),
        (),
    ),
    ("cli.fleet.file", ("cli.*", "sandboxd.errors", "sandboxd.plain_yaml", "sandboxd.termsafe"), ()),
    (
        "cli.config_file",
        ("cli.*", "sandboxd.envnames", "sandboxd.errors", "sandboxd.plain_yaml", "sandboxd.termsafe"),
        (),
    ),
    ("cli.plan", ("cli.*", "sandboxd.client", "sandboxd.envnames", "sandboxd.errors", "sandboxd.termsafe"), ()),
    ("cli.secrets", ("cli.*", "sandboxd.client", "sandboxd.errors", "sandboxd.termsafe"), ("prctl",)),
    ("cli.__main__", ("cli.*", "sandboxd.errors", "sandboxd.termsafe"), ("docopt",)),
    ("cli.run", ("cli.*", "sandboxd.errors"), ("docopt",)),
    ("cli.bucket", ("cli.*", "sandboxd.envnames", "sandboxd.errors", "sandboxd.plain_yaml", "sandboxd.termsafe"), ()),
    ("cli.s3", ("cli.bucket", "sandboxd.termsafe"), ("botocore",)),
    # Which versions are taken is one table, the daemon's.
    (
        "cli.facts",
        ("cli.*", "sandboxd.errors", "sandboxd.termsafe", "sandboxd.vm.firecracker_versions", "native"),
        (),
    ),
    (
        "cli*",
        (
            "cli.*", "sandboxd.client", "sandboxd.endpoint", "sandboxd.unixhttp", "sandboxd.errors",
            "sandboxd.termsafe", "native",
        ),
        (),
    ),
]  # fmt: skip


def modules() -> list[tuple[str, Path]]:
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = list(path.relative_to(ROOT).with_suffix("").parts)
            if parts[-1] == "__init__":
                parts.pop()
            found.append((".".join(parts), path))
    return found


def imports(name: str, path: Path) -> set[str]:
    names: set[str] = set()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                base = package.split(".")[: len(package.split(".")) - node.level + 1]
                origin = ".".join([*base, *([origin] if origin else [])])
            # `from sandboxd import wire` names a module, `from sandboxd.wire import X` does not.
            for alias in node.names:
                target = ROOT / origin.replace(".", "/") / f"{alias.name}.py"
                nested = ROOT / origin.replace(".", "/") / alias.name / "__init__.py"
                names.add(f"{origin}.{alias.name}" if target.exists() or nested.exists() else origin)
    return names


def rule(name: str) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    for pattern, ours, third_party in TABLE:
        if fnmatchcase(name, pattern):
            return ours, third_party
    return None


@pytest.mark.parametrize(("name", "path"), modules(), ids=[name for name, _ in modules()])
def test_a_module_imports_only_what_the_table_allows(name: str, path: Path) -> None:
    if not path.read_bytes().strip():
        return
    allowed = rule(name)
    assert allowed is not None, f"{name} has no row in the table: add one, with a reason, or fold it into a module"
    ours, third_party = allowed
    for imported in sorted(imports(name, path)):
        top = imported.partition(".")[0]
        if top in sys.stdlib_module_names:
            continue
        patterns = ours if top in PACKAGES else third_party
        fits = any(fnmatchcase(imported if top in PACKAGES else top, pattern) for pattern in patterns)
        assert fits, f"{name} imports {imported}, which is not in its row"


def test_every_row_of_the_table_is_used() -> None:
    names = [name for name, path in modules() if path.read_bytes().strip()]
    for position, (pattern, _, _) in enumerate(TABLE):
        earlier = [row[0] for row in TABLE[:position]]
        fits = [n for n in names if fnmatchcase(n, pattern) and not any(fnmatchcase(n, e) for e in earlier)]
        assert fits, f"no module left for the row {pattern!r}"
