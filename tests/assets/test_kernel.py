from __future__ import annotations

import pytest

from sandboxd.assets.kernel import SIGNATURE_MARK, dependencies, loading_order, modules_archive, unsigned


def module(*needs: str) -> bytes:
    return b"\x7fELF\0license=GPL\0depends=" + ",".join(needs).encode() + b"\0name=x\0"


DRIVERS = {
    "virtio": module("virtio_ring"),
    "virtio_ring": module(),
    "virtio_blk": module("virtio", "virtio-ring"),
    "virtio_net": module("net_failover", "virtio", "virtio_ring"),
    "net_failover": module("failover"),
    "failover": module(),
    "unused": module("nowhere"),
}


@pytest.mark.parametrize(
    ("wanted", "order"),
    [
        pytest.param([], [], id="nothing"),
        pytest.param(["failover"], ["failover"], id="one that needs none"),
        pytest.param(["virtio_blk"], ["virtio_ring", "virtio", "virtio_blk"], id="what it needs comes first, once"),
        pytest.param(
            ["virtio_blk", "virtio_net", "virtio"],
            ["virtio_ring", "virtio", "virtio_blk", "failover", "net_failover", "virtio_net"], id="shared needs",
        ),
    ],
)
def test_loading_order(wanted: list[str], order: list[str]) -> None:
    assert loading_order(DRIVERS, wanted) == order


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        pytest.param({}, "no module a", id="missing"),
        pytest.param({"a": module("b")}, "no module b", id="a need that is missing"),
        pytest.param({"a": module("b"), "b": module("a")}, "circle: a b a", id="a circle"),
        pytest.param({"a": b"text"}, "not a kernel module", id="no module information"),
    ],
)
def test_an_order_that_cannot_be(modules: dict[str, bytes], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        loading_order(modules, ["a"])


def test_names_are_those_of_the_loader() -> None:
    assert dependencies(module("crc32c-generic", "lib_x")) == ["crc32c_generic", "lib_x"]


def test_the_archive_holds_the_order_that_guest_init_reads_and_nothing_unused() -> None:
    raw = modules_archive(DRIVERS, ["virtio_blk"])
    assert b"virtio_ring.ko\nvirtio.ko\nvirtio_blk.ko\n" in raw
    assert b"modules/virtio_blk.ko\0" in raw
    assert b"failover" not in raw
    assert raw == modules_archive(dict(reversed(DRIVERS.items())), ["virtio_blk"])


@pytest.mark.parametrize(
    ("signed", "plain"),
    [
        (b"ELF" + b"S" * 20 + bytes(8) + (20).to_bytes(4, "big") + SIGNATURE_MARK, b"ELF"),
        (b"ELF", b"ELF"),
        (b"ELF~Module signature", b"ELF~Module signature"),
    ],
    ids=["signed", "not signed", "half a mark"],
)
def test_a_signature_is_cut_off(signed: bytes, plain: bytes) -> None:
    assert unsigned(signed) == plain


def test_a_signature_longer_than_its_module_is_refused() -> None:
    with pytest.raises(ValueError, match="longer"):
        unsigned(b"ELF" + bytes(8) + (99).to_bytes(4, "big") + SIGNATURE_MARK)


def test_what_only_a_device_needs_stands_behind_all_else_with_its_device() -> None:
    raw = modules_archive(DRIVERS, ["virtio_blk"], [("virtio_net", "0x0001"), ("failover", "0x0002")])
    order = b"virtio_ring.ko\nvirtio.ko\nvirtio_blk.ko\n"
    order += b"failover.ko 0x0001\nnet_failover.ko 0x0001\nvirtio_net.ko 0x0001\n"
    assert order in raw and b"0x0002" not in raw
