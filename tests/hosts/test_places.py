"""Unusual places: an operator on the first host, which has no key to itself, and hosts with unreachable addresses."""

import json
import shutil
import sys

import pytest

from conftest import ONE_THREAD, ROOT
from hosts_rig import nothing_stays
from ops_rig import FAKE_TRAINER

N_HOSTS, HOST_USERS = 2, ("root",)
DEMO = (
    "--preset demo --training.global_batch_size 8 --data.seq_len 64 --data.max_bytes 400000 --training.max_steps 2 "
    "--checkpoint.every 0 --evaluation.every 0 --evaluation.fraction 0"
)


@pytest.mark.parametrize("by", ["name", "address"])
def test_the_operator_is_on_the_first_host(hosts, by):
    place = hosts.shared / f"op-{by}"
    place.mkdir()
    shutil.copy(hosts.state / "key", place / "key")
    (place / "key").chmod(0o600)
    known = place / "known_hosts"
    known.write_text(
        "".join(
            line
            for line in (hosts.state / "known_hosts").read_text().splitlines(keepends=True)
            if hosts.address(1) not in line
        )
    )
    fake = " ".join(FAKE_TRAINER)
    names = [f"node-{i}" if by == "name" else hosts.address(i) for i in (1, 2)]
    config = f"Host node-2\n  HostName {hosts.address(2)}\n"
    config += f"Host *\n  IdentityFile {place}/key\n  IdentitiesOnly yes\n  UserKnownHostsFile {known}\n"
    (place / "config").write_text(config)
    (place / "hosts").write_text(
        "".join(f"{name} slots=1 workdir=/root/train_dir python={sys.executable}\n" for name in names)
    )
    kept = hosts.exec(1, "cat", "/root/.ssh/authorized_keys").stdout
    hosts.exec(1, "rm", "/root/.ssh/authorized_keys")  # nobody logs in here, not even from here
    shell = f"cd {place} && LLAMA405B_SSH_CONFIG={place}/config PYTHONPATH={ROOT}:{ROOT}/tools {sys.executable} -m llama405b_tools.cli"
    try:
        done = hosts.exec(
            1,
            "sh",
            "-c",
            f"{shell} launch {' '.join(ONE_THREAD)} --run here-{by} {DEMO} {fake} --follow",
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "2 ranks of 2 hosts" in done.stdout
        state = hosts.exec(1, "sh", "-c", f"{shell} status --run here-{by}", check=False)
        assert state.stdout.count("finished") == 2
    finally:
        hosts.exec(1, "sh", "-c", f"printf %s '{kept}' >/root/.ssh/authorized_keys")
    for i in (1, 2):
        assert nothing_stays(hosts, i)


def test_networks_of_their_own_change_nothing(hosts, operator):
    own = [hosts.address(i) for i in (1, 2)]
    for i in (1, 2):
        links = "ip link add nat0 type veth peer name nat1; ip link set nat0 up; ip link set nat1 up"
        hosts.exec(i, "sh", "-c", f"{links}; ip addr add 172.31.{i}.5/24 dev nat0")
    done = operator("launch", "--run", "meet", *DEMO.split(), "--follow")
    assert done.returncode == 0, done.stdout + done.stderr
    plan = json.loads((operator.path / "runs/meet/plan.json").read_text())
    assert plan["endpoint"].startswith(f"{own[0]}:")
    assert [(node["address"], node["interface"]) for node in plan["nodes"]] == [(address, "eth0") for address in own]
    assert operator("doctor").returncode == 0


def test_an_address_that_gloo_would_not_take_is_refused(hosts, operator):
    """Last: it moves node-2's addresses."""
    address = hosts.address(2)
    hosts.exec(
        2, "sh", "-c", f"ip addr flush dev eth0; ip addr add 172.30.2.5/24 dev eth0; ip addr add {address}/24 dev eth0"
    )
    done = operator("launch", "--run", "hid", *DEMO.split())
    assert done.returncode == 1
    assert f"node-2: its eth0 has 172.30.2.5 before {address}" in done.stderr
    assert "or on an interface of its own" in done.stderr
