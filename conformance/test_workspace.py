"""A repository on its way in and out, and directories of the client's machine."""

from __future__ import annotations

import os
from urllib.parse import quote

from conformance import bundle, shape
from conformance.endpoint import Endpoint
from conformance.estate import Estate, Sandbox

BRANCH = "work"


def test_a_bundle_goes_in_and_comes_out_with_what_was_changed(box: Sandbox, estate: Estate) -> None:
    """C48"""
    data, base = bundle.of_one_file(b"hello.txt", b"hello\n" * 40)
    estate.needs(
        "workspace_bundle", ("POST", f"{box.path}/workspace?branch={BRANCH}", data),
        ("GET", f"{box.path}/workspace/bundle?base={base}&branch={BRANCH}", None),
    )  # fmt: skip
    for bad in (
        "..", "a..b", "-lead", "a//b", "end/", "end.lock", "end.", "", "has blank", "/lead", "nul\0", 201 * "a",
    ):  # fmt: skip
        shape.refused(box.call("POST", f"/workspace?branch={quote(bad, safe='')}", data), 400)
        shape.refused(box.call("GET", f"/workspace/bundle?base={base}&branch={quote(bad, safe='')}"), 400)
        shape.refused(box.call("GET", f"/workspace/bundle?base={quote(bad, safe='')}&branch={BRANCH}"), 400)
    shape.refused(box.call("POST", "/workspace", data), 400)
    shape.refused(box.call("POST", f"/workspace?branch={BRANCH}", b"this is no bundle"), 400)
    shape.done(box.call("POST", f"/workspace?branch={BRANCH}", data))
    assert box.read("/workspace/hello.txt").body == b"hello\n" * 40
    out = f"/workspace/bundle?base={base}&branch={BRANCH}"
    shape.refused(box.call("GET", out), 409)
    who = [option for key in ("name", "email") for option in ("-c", f"user.{key}=guest")]
    git = ("git", "-C", "/workspace", *who)
    assert box.run(*git, "commit", "--quiet", "--allow-empty", "--message", "Two").exit_code == 0
    made = box.run(*git, "rev-parse", "HEAD").stdout.decode().strip()
    answer = box.call("GET", out)
    assert (answer.status, answer.media_type) == (200, "application/octet-stream"), answer
    found = bundle.head(answer.body)
    assert list(found.references.values()) == [made] and found.needs == (base,)
    shape.refused(box.call("GET", f"/workspace/bundle?base={'0' * 40}&branch={BRANCH}"), 400)
    shape.refused(box.call("GET", f"/workspace/bundle?base={base}&branch=unknown"), 400)


def test_directories_that_hold_everything_are_never_bound(estate: Estate, endpoint: Endpoint) -> None:
    """C49

    Without the operator's permission no directory is; with it, these are not.
    """
    home = os.path.expanduser("~")  # the variable HOME first: a user may have no account
    paths = ["/", home, os.path.dirname(home)]
    if not estate.offer.has("bind_workspace"):
        paths.append("/srv/conformance/nothing-here")
    for path in paths:
        message = estate.refuse(403, bind={"host_path": path, "read_only": True})
        assert "nothing-here" not in message
