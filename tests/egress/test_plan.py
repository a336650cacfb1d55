from __future__ import annotations

import ipaddress

import pytest

from egress import plan

INSTANCE = "0123456789ab"


def test_a_namespace_names_the_instance_and_the_sandbox() -> None:
    its = plan.of(INSTANCE, "sbx_00112233445566ff")
    assert its.namespace == "sbx-0123456789ab-00112233445566ff"
    assert plan.sandbox_of(its.namespace, INSTANCE) == "sbx_00112233445566ff"


def test_a_sandbox_of_a_node_with_an_id_has_a_namespace_that_leads_back_to_it() -> None:
    id = "sbx_rack-7_00112233445566ff"
    its = plan.of(INSTANCE, id)
    assert its.namespace != plan.of(INSTANCE, "sbx_00112233445566ff").namespace and "/" not in its.namespace
    assert plan.sandbox_of(its.namespace, INSTANCE) == id


def test_sandboxes_whose_ids_begin_alike_have_namespaces_of_their_own() -> None:
    one, other = plan.of(INSTANCE, "sbx_0011223344556677"), plan.of(INSTANCE, "sbx_0011223344556678")
    assert one.namespace != other.namespace


def test_the_addresses_of_a_link_are_in_one_network_and_the_names_in_none_of_the_worlds() -> None:
    its = plan.of(INSTANCE, "sbx_00112233445566ff")
    network = ipaddress.ip_interface(f"{its.host_address}/{its.prefix}").network
    assert [str(host) for host in network.hosts()] == [its.host_address, its.guest_address]
    assert not ipaddress.ip_network(its.names).is_global
    assert len(its.interface) < 16


@pytest.mark.parametrize(
    ("instance", "sandbox"),
    [
        (INSTANCE, "sbx_00112233445566f"),
        (INSTANCE, "sbx__0011223344556677"),
        (INSTANCE, "sbx_-n_0011223344556677"),
        (INSTANCE, "sbx_n/m_0011223344556677"),
        (INSTANCE, "sbx_n_m_0011223344556677"),
        (INSTANCE, "sbx_00112233445566FF"),
        (INSTANCE, "../../../etc"),
        (INSTANCE, "sbx_00112233445566ff\n"),
        (INSTANCE, ""),
        ("", "sbx_00112233445566ff"),
        ("0123456789ab/", "sbx_00112233445566ff"),
    ],
)
def test_what_is_no_id_names_nothing(instance: str, sandbox: str) -> None:
    with pytest.raises(ValueError, match="no network can be named"):
        plan.of(instance, sandbox)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("sbx-ffffffffffff-00112233445566ff", id="another instance's"),
        pytest.param("sbx-0123456789ab-00112233445566ff-x", id="longer"),
        pytest.param("sbx-0123456789ab-00112233445566f", id="shorter"),
        pytest.param("docker", id="somebody's"),
        pytest.param("sbx-0123456789ab-", id="nothing behind the instance"),
    ],
)
def test_a_namespace_of_somebody_elses_is_nobodys_sandbox(name: str) -> None:
    assert plan.sandbox_of(name, INSTANCE) is None
