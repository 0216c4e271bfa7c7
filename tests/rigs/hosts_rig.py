"""Real hosts on one machine: N network namespaces, each with its own sshd, host name, PID space, root and users.

Each host sees this machine's files through its own overlay: what it writes stays its own, except below ``shared``.
Needs root, sshd and iproute2. Ends and removes only what this module created.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from ops_rig import wait_for
from ranks_rig import ROOT

KEY = os.getpid() % 250  # of this process: two can have hosts at once, and what a killed one left is in nobody's way
NET = f"10.213.{KEY}"
BRIDGE = f"l4br{KEY}"
USERS = ("root", "alice", "bob", "carol")

INIT = r"""
set -eu
name=$1 dir=$2 shared=$3 user=$4 size=$5 hide=$6; shift 6
mount --make-rprivate /
hostname "$name"
mount -t tmpfs -o "size=$size,mode=755" rw "$dir/rw"
mkdir -p "$dir/rw/upper" "$dir/rw/work" "$dir/root"
mount -t overlay -o "lowerdir=/,upperdir=$dir/rw/upper,workdir=$dir/rw/work" "$name" "$dir/root"
r=$dir/root
mount -t proc proc "$r/proc"; mount -t sysfs -o ro sysfs "$r/sys"; mount --bind /dev "$r/dev"
[ ! -d /sys/fs/cgroup ] || mount --rbind /sys/fs/cgroup "$r/sys/fs/cgroup"
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts "$r/dev/pts"
mount -t tmpfs shm "$r/dev/shm"; mount -t tmpfs run "$r/run"; rm -rf "$r"/tmp/tmux-*
mkdir -p "$r/run/sshd" "$r$shared"; mount --bind "$shared" "$r$shared"
[ -z "$hide" ] || { mount -t tmpfs -o size=1m none "$r$hide"; rm -rf "$r/root/.cache"; }
sed -i 's/^hosts:.*/hosts: files/' "$r/etc/nsswitch.conf"
cp "$dir/hosts" "$r/etc/hosts"; echo "$name" >"$r/etc/hostname"
for p in "$@"; do while [ "$p" != / ]; do chmod o+rx "$r$p" 2>/dev/null || :; p=$(dirname "$p"); done; done
[ -e "$r/usr/bin/python3" ] || ln -s "${!#}/python3" "$r/usr/local/bin/python3"
[ "$user" = root ] || chroot "$r" useradd -m -s /bin/bash -p '*' "$user"
home=$(chroot "$r" sh -c "echo ~$user")
mkdir -p "$r$home/.ssh"; cp "$dir/authorized_keys" "$r$home/.ssh/authorized_keys"
rm -f "$r$home/.ssh/config" "$r$home/.ssh/known_hosts" "$r$home/.bashrc"
mkdir -p "$r$home/train_dir"; chroot "$r" chown -R "$user" "$home/.ssh" "$home/train_dir"
cp "$dir/host_key" "$r/etc/ssh/rig_key"; chmod 600 "$r/etc/ssh/rig_key"
printf '%s\n' 'HostKey /etc/ssh/rig_key' 'PidFile /run/sshd.pid' 'PasswordAuthentication no' 'StrictModes no' \
    'KbdInteractiveAuthentication no' 'PermitRootLogin prohibit-password' 'UsePAM no' 'MaxSessions 100' \
    'MaxStartups 200' >"$r/etc/ssh/rig_config"
exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin chroot "$r" /bin/bash -c '
    /usr/sbin/sshd -f /etc/ssh/rig_config -E /var/log/rig_sshd.log
    while :; do sleep 3600 & wait -n; done'
"""


def missing():
    """Why real hosts cannot be had here, or ''."""
    if os.getuid() != 0:
        return "needs root"
    programs = [name for name in ("ip", "unshare", "nsenter", "ssh-keygen", "tmux") if not shutil.which(name)]
    if not Path("/usr/sbin/sshd").exists():
        programs.append("sshd")
    return f"needs {', '.join(programs)}" if programs else ""


def run(*args, **more):
    return subprocess.run(args, check=True, capture_output=True, text=True, timeout=30, **more)


def processes(hosts, i):
    """What runs on a host beside sshd and its keeper."""
    lines = hosts.exec(i, "ps", "-wweo", "args", "--no-headers").stdout.splitlines()
    quiet = ("/bin/bash -c", "sshd:", "sleep 3600", "ps -wweo", "[")
    return [line for line in lines if not line.startswith(quiet)]


def nothing_stays(hosts, i):
    """Whether nothing of ours runs on a host: what a connection served has until it has seen that this is closed."""
    return wait_for(lambda: not processes(hosts, i), 10, lambda: processes(hosts, i))


class Hosts:
    """The hosts ``node-1`` … ``node-N``, each with another user; the operator is this process's namespace."""

    def __init__(self, count, users=USERS, blank=False):
        """``blank``: the hosts have neither this checkout nor its environment, and room to make their own."""
        self.count, self.users, self.blank = count, users, blank
        self.state = Path(tempfile.mkdtemp(prefix="l4hosts-"))
        self.shared = self.state / "shared"
        self.shared.mkdir()
        self.state.chmod(0o755)
        self.shared.chmod(0o1777)
        self.inits = {}

    def __enter__(self):
        try:
            self._up()
        except subprocess.CalledProcessError as error:
            self._down()
            raise RuntimeError(f"{error.cmd}: {error.stderr}") from error
        except BaseException:
            self._down()
            raise
        return self

    def __exit__(self, *exc):
        self._down()

    def user(self, i):
        return self.users[(i - 1) % len(self.users)]

    def address(self, i):
        return f"{NET}.{10 + i}"

    def workdir(self, i):
        home = "/root" if self.user(i) == "root" else f"/home/{self.user(i)}"
        return f"{home}/train_dir"

    def exec(self, i, *command, check=True, timeout=60):
        """Run a command inside a host without ssh."""
        pid = run("pgrep", "-P", str(self.inits[i].pid)).stdout.split()[0]
        inside = ("nsenter", "-t", pid, "--mount", "--uts", "--ipc", "--net", "--pid", "--root", "--wd=/")
        return subprocess.run([*inside, *command], check=check, capture_output=True, text=True, timeout=timeout)

    def wrote(self, i, text):
        """The files that a host has written, of those on its disk, in which there is a text."""
        pid = run("pgrep", "-P", str(self.inits[i].pid)).stdout.split()[0]
        search = ("grep", "-rlF", "-D", "skip", "--", text, str(self.state / f"node-{i}" / "rw" / "upper"))
        found = subprocess.run(
            ["nsenter", "-t", pid, "--mount", *search], capture_output=True, text=True, timeout=60, check=False
        )
        assert found.returncode in (0, 1), found.stderr
        return found.stdout.splitlines()

    def speak(self, i, language):
        """Have all that is run on a host over ssh speak a language, such as de_DE, or none (''); skips where it cannot be had."""
        locales = self.shared / "locales"
        locales.mkdir(exist_ok=True)
        lines = "unset LANG LC_ALL LANGUAGE"
        if language:
            command = ["localedef", "-i", language, "-f", "UTF-8", str(locales / f"{language}.UTF-8")]
            subprocess.run(command, check=False, capture_output=True)
            lines = f"export LOCPATH={locales} LANG={language}.UTF-8 LC_ALL="
        run("chmod", "-R", "a+rX", str(locales))
        self.exec(i, "su", self.user(i), "-c", f"echo '{lines}' >~/.bashrc")
        ask = ["ssh", "-F", str(self.state / "ssh_config"), f"node-{i}", "sha256sum --odd"]
        said = subprocess.run(ask, check=False, capture_output=True, text=True, timeout=20).stderr
        if language and "unrecognized option" in said:
            pytest.skip(f"NOT RUN: needs the locale {language} and coreutils in it (apt-get install locales)")

    def crash(self, i):
        """Power loss."""
        self.inits[i].send_signal(signal.SIGKILL)
        self.inits[i].wait(10)

    def hosts_file(self, path, extra="", indices=None):
        lines = [
            f"node-{i} slots=1 workdir=~/train_dir python={sys.executable}{extra}\n"
            for i in indices or range(1, self.count + 1)
        ]
        path.write_text("".join(lines))
        return path

    def env(self):
        """What the operator's programs need to reach the hosts."""
        return {"LLAMA405B_SSH_CONFIG": str(self.state / "ssh_config"), "SSH_AUTH_SOCK": ""}

    def _up(self):
        run("ip", "link", "add", BRIDGE, "type", "bridge")
        run("ip", "addr", "add", f"{NET}.1/24", "dev", BRIDGE)
        run("ip", "link", "set", BRIDGE, "up")
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.state / "key"))
        names = "".join(f"{self.address(i)} node-{i}\n" for i in range(1, self.count + 1))
        known, config = [], []
        for i in range(1, self.count + 1):
            directory = self.state / f"node-{i}"
            (directory / "rw").mkdir(parents=True)
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / "host_key"))
            (directory / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 node-{i}\n{names}")
            shutil.copy(self.state / "key.pub", directory / "authorized_keys")
            known.append(f"{self.address(i)} {' '.join((directory / 'host_key.pub').read_text().split()[:2])}\n")
            config.append(f"Host node-{i}\n  HostName {self.address(i)}\n  User {self.user(i)}\n")
        (self.state / "known_hosts").write_text("@cert-authority *.example.org ssh-ed25519 AAAA\n" + "".join(known))
        (self.state / "ssh_config").write_text(
            "".join(config)
            + (
                f"Host *\n  IdentityFile {self.state}/key\n  IdentitiesOnly yes\n  UserKnownHostsFile {self.state}/known_hosts\n"
                "  StrictHostKeyChecking yes\n"
            )
        )
        for i in range(1, self.count + 1):
            self.boot(i)
        self._wait()

    def boot(self, i):
        namespace, directory = f"l4h{KEY}-{i}", self.state / f"node-{i}"
        if not Path(f"/run/netns/{namespace}").exists():
            run("ip", "netns", "add", namespace)
            run("ip", "link", "add", f"l4v{KEY}-{i}", "type", "veth", "peer", "name", "eth0", "netns", namespace)
            run("ip", "link", "set", f"l4v{KEY}-{i}", "master", BRIDGE, "up")
            run("ip", "-n", namespace, "addr", "add", f"{self.address(i)}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                run("ip", "-n", namespace, "link", "set", link, "up")
        readable = [*([] if self.blank else [str(ROOT)]), str(Path(sys.executable).resolve().parent)]
        self.inits[i] = subprocess.Popen(
            [
                "nsenter",
                f"--net=/run/netns/{namespace}",
                "unshare",
                "--mount",
                "--uts",
                "--ipc",
                "--pid",
                "--fork",
                "--kill-child",
                "bash",
                "-c",
                INIT,
                "init",
                f"node-{i}",
                str(directory),
                str(self.shared),
                self.user(i),
                "3500m" if self.blank else "1500m",
                str(ROOT) if self.blank else "",
                *readable,
            ],
            stdin=subprocess.DEVNULL,
            stdout=(directory / "console.log").open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _wait(self):
        deadline = time.monotonic() + 120
        for i in range(1, self.count + 1):
            while True:
                done = subprocess.run(
                    ["ssh", "-F", str(self.state / "ssh_config"), f"node-{i}", "true"],
                    capture_output=True,
                    text=True,
                    timeout=20,
                    check=False,
                )
                if done.returncode == 0:
                    break
                if time.monotonic() > deadline or self.inits[i].poll() is not None:
                    raise RuntimeError(f"node-{i}: {done.stderr} {(self.state / f'node-{i}/console.log').read_text()}")
                time.sleep(0.1)

    def _down(self):
        for init in self.inits.values():
            init.kill()  # --kill-child: every process of the host goes with it
            init.wait(10)
        for i in range(1, self.count + 1):
            subprocess.run(["ip", "netns", "del", f"l4h{KEY}-{i}"], capture_output=True, check=False)
            subprocess.run(["ip", "link", "del", f"l4v{KEY}-{i}"], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True, check=False)
        shutil.rmtree(self.state, ignore_errors=True)
