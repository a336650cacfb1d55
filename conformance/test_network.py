"""What a sandbox may reach: how it is asked for, what is given, and that sandboxes do not reach each other."""

from __future__ import annotations

import secrets

import pytest

from conformance import shape
from conformance.conftest import DENIED, Heir, Past
from conformance.estate import Estate, Offer, Sandbox
from conformance.guest import Listener, own_address, reach, speaker


def test_without_a_word_a_sandbox_gets_the_default_network(box: Sandbox, offer: Offer) -> None:
    """C22"""
    default = offer.network["default"]
    assert box.body["network"]["mode"] == default["mode"]
    assert box.body["network"]["allow"] == default["allow"]
    assert box.get()["network"] == box.body["network"]


def test_a_mode_above_the_ceiling_is_refused_and_an_unknown_one_is_a_mistake(
    estate: Estate, offer: Offer, closed: Sandbox
) -> None:
    """C23"""
    for mode in offer.above_ceiling():
        estate.refuse(403, network={"mode": mode})
    estate.refuse(400, network={"mode": "wide-open"})
    assert closed.body["network"] == {"mode": "none", "allow": None}
    assert closed.get()["network"] == {"mode": "none", "allow": None}


def test_an_empty_allowlist_is_refused(estate: Estate) -> None:
    """C24"""
    estate.refuse(403, network={"mode": "allowlist", "allow": []})


def test_denied_names_are_stored_once_in_normal_form(heir: Heir, estate: Estate, offer: Offer) -> None:
    """C25"""
    default, given = offer.network["default"], heir.sandbox.body["network"]
    assert given["mode"] == default["mode"] and given["allow"] == default["allow"]
    if offer.networked:
        assert given["deny"] == sorted({"gist.github.com", *default.get("deny", [])}), (DENIED, given)
    else:
        assert "deny" not in given
    for name in ("https://gist.github.com/", "a..b", "*", "*.*.a.example", "a.example:443", "10.0.0.1", "-a.example"):
        estate.refuse(400, network={"deny": [name]})


def test_a_list_for_a_mode_without_one_is_refused(estate: Estate) -> None:
    for mode in ("none", "open"):
        estate.refuse(400, network={"mode": mode, "allow": ["a.example"]})


def test_a_name_the_server_may_not_allow_is_refused(estate: Estate, offer: Offer, heir: Heir) -> None:
    """C26"""
    name = f"{secrets.token_hex(8)}.invalid"
    asked = {"mode": "allowlist", "allow": [name]}
    if "*" not in offer.network["may_allow"] or offer.network["ceiling"] == "none":
        estate.refuse(403, network=asked)
        estate.refuse(403, network={"mode": "allowlist", "allow": [f"*.{name}"]})
        return
    if not offer.networked or not offer.has("network_policy_update"):
        pytest.skip("every name may be allowed here, and the endpoint lacks the capability network_policy_update")
    # Any name may be allowed here: then it is, and a given list replaces the default.
    before = heir.sandbox.get()["network"]
    changed = shape.ok(heir.sandbox.call("PATCH", body={"network": asked}))["network"]
    assert changed["allow"] == [name]
    back = {"mode": before["mode"], "deny": before.get("deny", [])}
    assert shape.ok(heir.sandbox.call("PATCH", body={"network": back}))["network"] == before


def test_a_network_can_be_narrowed_and_not_widened_past_the_ceiling(past: Past, offer: Offer) -> None:
    """C27"""
    if not offer.has("network_policy_update"):
        shape.refused(past.narrowed, 501)
        if past.opened is not None:
            shape.refused(past.opened, 501)
        return
    if past.opened is not None:
        shape.refused(past.opened, 403)
    assert shape.sandbox(shape.ok(past.still))["network"] == past.sandbox.body["network"]
    for answer in (past.narrowed, past.narrow):
        assert shape.sandbox(shape.ok(answer), "running")["network"] == {"mode": "none", "allow": None}


def test_one_sandbox_does_not_reach_what_listens_in_another(box: Sandbox, heir: Heir, offer: Offer) -> None:
    """C44"""
    if not offer.networked:
        pytest.skip("the endpoint lacks the capability egress_allowlist: no sandbox has a network here")
    language = speaker(box)
    secret = secrets.token_hex(8).encode()
    with Listener(box, language, secret, everywhere=True) as listener:
        address = own_address(box, language)
        assert secret in reach(box, language, address, listener.port).reply
        for where in (address, "127.0.0.1", "localhost"):
            assert secret not in reach(heir.sandbox, language, where, listener.port).reply
