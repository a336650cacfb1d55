"""The rules inside a sandbox's namespace, as one text for `nft -f -`. Pure.

In: a plan and a mode. Out: the text. Loading it replaces what an earlier one put there, in one transaction and
without taking a chain off its hook, so there is no moment between two modes. A packet meets, in this order:

    guard     every frame, before the kernel looks into it: only the guest's own MAC and address, only ARP and IPv4
    arrive    before anything is remembered of it: what the mode lets through to us goes on, the rest is answered
              with RST or ICMP at once
    settled   packets of no connection are answered with RST
    divert    TCP to the proxy, DNS to the answerer, whatever their destination was
    deliver   only what was redirected reaches a socket; nothing is forwarded

No rule leads to a network: there is none in the namespace. The rules say what reaches our own two sockets.
"""

from __future__ import annotations

from egress.plan import Plan
from egress.policy import Mode

TABLE = "sandbox"
COUNTERS = ("spoofed", "flooded", "refused", "stray", "redirected", "answered")

# Far above what a guest needs, far below what would hold up its neighbours. What is beyond is dropped, not refused:
# TCP and resolvers try again a second later.
NEW_CONNECTIONS = "limit rate over 2000/second burst 4000 packets"
DNS_PACKETS = "limit rate over 2000/second burst 4000 packets"
REFUSALS = "limit rate over 2000/second burst 4000 packets"
ARP_PACKETS = "limit rate 100/second burst 200 packets"


def text(plan: Plan, mode: Mode) -> str:
    return f"""\
{_chains(plan)}
flush table netdev {TABLE}
flush table inet {TABLE}

{_guard(plan)}
{_inet(plan, mode)}"""


def _chains(plan: Plan) -> str:
    """Declared before they are flushed, so that the flush finds them the first time too."""
    return f"""\
table netdev {TABLE} {{
    counter spoofed {{ }}
    chain guard {{ type filter hook ingress device "{plan.interface}" priority -500; policy drop; }}
}}
table inet {TABLE} {{
    counter flooded {{ }}
    counter refused {{ }}
    counter stray {{ }}
    counter redirected {{ }}
    counter answered {{ }}
    chain refuse {{ }}
    chain arrive {{ type filter hook prerouting priority raw; policy drop; }}
    chain settled {{ type filter hook prerouting priority mangle; policy accept; }}
    chain divert {{ type nat hook prerouting priority dstnat; policy accept; }}
    chain deliver {{ type filter hook input priority filter; policy drop; }}
    chain forward {{ type filter hook forward priority filter; policy drop; }}
}}"""


def _guard(plan: Plan) -> str:
    return f"""\
table netdev {TABLE} {{
    chain guard {{
        ether saddr {plan.guest_mac} ether type ip ip saddr {plan.guest_address} accept
        ether saddr {plan.guest_mac} arp operation request arp saddr ip {plan.guest_address} {ARP_PACKETS} accept
        counter name spoofed drop
    }}
}}"""


def _inet(plan: Plan, mode: Mode) -> str:
    return f"""\
table inet {TABLE} {{
    chain refuse {{
        {REFUSALS} counter name flooded drop
        counter name refused
        meta l4proto tcp reject with tcp reset
        meta l4proto udp reject with icmp port-unreachable
        reject with icmp admin-prohibited
    }}
    chain arrive {{
        iifname != "{plan.interface}" counter name stray drop
{_accepted(plan, mode)}        goto refuse
    }}
    chain settled {{
        ct state invalid goto refuse
        ct state new meta l4proto tcp {NEW_CONNECTIONS} counter name flooded drop
    }}
    chain divert {{
        meta l4proto {{ tcp, udp }} th dport 53 counter name answered redirect to :{plan.dns_port}
        meta l4proto tcp counter name redirected redirect to :{plan.proxy_port}
    }}
    chain deliver {{
        ct status dnat tcp dport {{ {plan.proxy_port}, {plan.dns_port} }} accept
        ct status dnat udp dport {plan.dns_port} accept
        counter name stray drop
    }}
    chain forward {{
        counter name stray drop
    }}
}}
"""


def _accepted(plan: Plan, mode: Mode) -> str:
    """What goes on to us. On the ports of the web any address does: there the name on the wire decides."""
    dns = [f"udp dport 53 {DNS_PACKETS} counter name flooded drop", "meta l4proto { tcp, udp } th dport 53 accept"]
    web = ["tcp dport { 80, 443 } accept"]
    rules = {
        Mode.NONE: [],
        Mode.ALLOWLIST: [*dns, *web, f"ip daddr {plan.names} meta l4proto tcp accept"],
        Mode.OPEN: [*dns, *web, f"ip daddr {plan.host_address} goto refuse", "meta l4proto tcp accept"],
    }[mode]
    return "".join(f"        {rule}\n" for rule in rules)
