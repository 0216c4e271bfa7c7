"""The program that doctor runs on a bare host.

It is sent through SSH's standard input as one file and runs under Python 3.6 or newer. It needs nothing of ours but
contract/disk.py, which is sent with it. It leaves no change behind and draws no conclusions.

Line 1 of its standard input is a request (JSON). It prints the facts (one line of JSON), listens, reads a second line
that names the peers, tries to reach them, prints the results, and ends. It also ends when its input closes. Until then
one of the hosts keeps a canary file in the directory that all hosts are to share, for the other hosts to look for.
"""

import concurrent.futures
import errno
import fcntl
import glob
import hashlib
import json
import os
import platform
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

from llama405b.contract.disk import disk_free_bytes, disk_free_files, unsupported_operation
from llama405b_tools.agent.facts import disk_space, machine_name, marked_processes, memory, rdma_ports, read_text

GPU_FIELDS = (
    "index,name,memory.total,memory.used,ecc.errors.uncorrected.volatile.total,retired_pages.pending,"
    "remapped_rows.pending,clocks.sm,power.limit,power.max_limit,clocks_event_reasons.active,"
    "pcie.link.width.current,pcie.link.width.max,temperature.gpu,mig.mode.current,driver_version"
)
BASIC_GPU_FIELDS = "index,name,memory.total,memory.used,driver_version"
REAL_FILESYSTEMS = (
    "ext4",
    "xfs",
    "btrfs",
    "zfs",
    "nfs",
    "nfs4",
    "lustre",
    "gpfs",
    "beegfs",
    "wekafs",
    "ceph",
    "overlay",
)
PROBE_BYTES = 64 << 20
N_HASH_THREADS = 16  # blocks at a time
BLOCK_BYTES = 64 << 20  # as in contract/hashes.py
CONNECT_TIMEOUT_S = 3.0
CANARY_TIMEOUT_S = 3.0  # for a file that another host has written
MAX_OUTPUT_BYTES = 4 << 20  # of a command's output
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # as PyTorch reads them
PACKAGES_SCRIPT = r"""
import sys
sys.path = [path for path in sys.path if path]  # the directory may have a random.py of the user's
import json, os, re
try:
    from importlib.metadata import distributions
    versions = {(d.metadata["Name"] or "").lower().replace("_", "-"): d.version for d in distributions()}
except ImportError:
    versions = {}
names = ("torch", "transformers", "flash-attn", "llama405b")
packages = {name: versions.get(name, "missing") for name in names}
packages["nccl"] = next((v for n, v in versions.items() if n.startswith("nvidia-nccl")), "missing")
cuda = ""
for folder in sys.path:
    try:
        text = open(os.path.join(folder, "torch", "version.py")).read()
        match = re.search(r"^cuda[^=]*= *'([^']+)'", text, re.M)
        cuda = match.group(1) if match else "none"
        break
    except (OSError, IOError):
        continue
packages["cuda"] = cuda or "missing"
if packages["llama405b"] != "missing":
    sys.dont_write_bytecode = True
    sys.path.insert(0, os.getcwd())  # our packages are those there, if there are any, whatever is installed
    try:
        import llama405b
        sys.path.append(sys.path.pop(0))
        from llama405b.contract.software import code_version
        packages["llama405b"] = code_version()
    except Exception:  # older code, or an older python: its version must do
        pass
packages["python"] = "%d.%d.%d" % sys.version_info[:3]
print(json.dumps(packages))
"""


def run(args, timeout=15, **popen_kwargs):
    """Return a command's output in English, up to a size limit.

    None if it is not installed, "TIMEOUT" if it hangs.
    """
    if not shutil.which(args[0]):
        return None
    popen_kwargs["env"] = dict(popen_kwargs.get("env", os.environ), LC_ALL="C")
    try:
        child = subprocess.Popen(
            args,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            **popen_kwargs,
        )
    except OSError as error:
        return "FAILED %s" % error
    timed_out = threading.Event()
    timer = threading.Timer(timeout, lambda: (timed_out.set(), os.killpg(child.pid, signal.SIGKILL)))
    timer.daemon = True
    timer.start()
    # Read up to a limit instead of communicate(): a command that prints without end must not fill the memory.
    with child:
        output = child.stdout.read(MAX_OUTPUT_BYTES)
        if len(output) == MAX_OUTPUT_BYTES:
            os.killpg(child.pid, signal.SIGKILL)
    timer.cancel()
    return "TIMEOUT" if timed_out.is_set() else output.decode("utf-8", "replace")


def read_identity():
    """Return who the user is and what this machine is."""
    release = dict(line.split("=", 1) for line in read_text("/etc/os-release").splitlines() if "=" in line)
    return {
        "hostname": socket.gethostname(),
        "os": release.get("PRETTY_NAME", "").strip('"'),
        "kernel": platform.release(),
        "arch": platform.machine(),
        "user": os.environ.get("USER") or str(os.getuid()),
        "machine": machine_name(),
        "cores": len(os.sched_getaffinity(0)),
        "upgraded_by": find_upgrade_service(),
        "must_reboot": os.path.exists("/run/reboot-required")
        or "Reboot is required" in (run(["needs-restarting", "-r"], 10) or ""),
        "tools": {name: bool(shutil.which(name)) for name in ("tmux", "ip", "git", "nvidia-smi", "srun")},
    }


def find_upgrade_service():
    """Return the service that upgrades packages (NVIDIA's, too) automatically; '' if there is none."""
    apt = run(["apt-config", "dump"], 5) or ""
    is_excluded = re.search(r"^Unattended-Upgrade::Package-Blacklist::.*nvidia", apt, re.M)
    if re.search(r'^APT::Periodic::Unattended-Upgrade "(?!0?")', apt, re.M) and not is_excluded:
        return "unattended-upgrades"
    timers = ("dnf-automatic.timer", "dnf-automatic-install.timer")
    return next(
        (timer for timer in timers if (run(["systemctl", "is-enabled", timer], 5) or "").strip() == "enabled"), ""
    )


def read_environment(request):
    """Return the target Python's packages, without importing any, and the version of the project's code."""
    workdir = os.path.expanduser(request["workdir"])
    python = os.path.expanduser(request["python"])
    facts = {"workdir": workdir, "workdir_exists": os.path.isdir(workdir), "packages": None, "code": ""}
    facts["allocator"] = next(filter(None, map(os.environ.get, ALLOCATOR_VARIABLES)), "")
    facts["max_connections"] = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    try:
        result = subprocess.run(
            [python, "-c", PACKAGES_SCRIPT],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            cwd=workdir if facts["workdir_exists"] else "/",
            env={name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "PYTHONPATH")},
            timeout=30,
        )
        facts["packages"] = json.loads(result.stdout.decode())
    except (OSError, ValueError, subprocess.TimeoutExpired):
        pass
    commit = run(["git", "-C", workdir, "rev-parse", "--short=12", "HEAD"], 5) if facts["workdir_exists"] else None
    if commit and "fatal" not in commit:
        dirty = run(["git", "-C", workdir, "status", "--porcelain", "-uno"], 10)
        facts["code"] = commit.strip() + ("+changes" if dirty and dirty.strip() else "")
    return facts


def read_nvidia_smi():
    """Return the output of nvidia-smi, unparsed."""
    query = ["--format=csv,noheader,nounits"]
    text = run(["nvidia-smi", "--query-gpu=" + GPU_FIELDS] + query, 20)
    if text is None or text == "TIMEOUT":
        return {"smi": text}
    fields = GPU_FIELDS
    if "not a valid field" in text:
        fields = BASIC_GPU_FIELDS
        text = run(["nvidia-smi", "--query-gpu=" + fields] + query, 20)
    return {
        "smi": text,
        "fields": fields.split(","),
        "apps": run(["nvidia-smi", "--query-compute-apps=pid,used_memory,process_name"] + query),
        "nvlink": run(["nvidia-smi", "nvlink", "-s"]),
        "xid": [line for line in (run(["dmesg"], 10) or "").splitlines() if "Xid" in line][-20:],
        "dmesg_readable": "not permitted" not in (run(["dmesg", "-s", "100"], 5) or "not permitted"),
        "fabric_manager": (run(["systemctl", "is-active", "nvidia-fabricmanager"], 5) or "").strip(),
    }


def read_rdma() -> dict:
    """Return every port of every RDMA device, from sysfs."""
    ports = []
    for path, port in rdma_ports():
        gids = []
        for kind in sorted(glob.glob(path + "/gid_attrs/types/*"), key=lambda p: int(os.path.basename(p))):
            index = os.path.basename(kind)
            gid, name = read_text(path + "/gids/" + index).strip(), read_text(kind).strip()
            if name and gid.replace(":", "").strip("0"):
                gids.append([int(index), name, gid, read_text(path + "/gid_attrs/ndevs/" + index).strip()])
        interfaces = os.path.join(path, "../../device/net")
        ports.append(
            dict(
                port,
                port=int(port["port"]),
                link_layer=read_text(path + "/link_layer").strip(),
                gids=gids,
                netdevs=sorted(os.listdir(interfaces)) if os.path.isdir(interfaces) else [],
            )
        )
    modules = read_text("/proc/modules")
    return {"ports": ports, "peermem": "nvidia_peermem" in modules or "nv_peer_mem" in modules}


def read_network() -> dict:
    """Return this host's IPv4 addresses with interfaces and speeds, and the default route's interface."""
    addresses = []
    for line in (run(["ip", "-4", "-o", "addr"], 5) or "").splitlines():
        words = line.split()
        if len(words) > 3 and words[1] != "lo":
            speed = read_text("/sys/class/net/%s/speed" % words[1]).strip()
            addresses.append({"interface": words[1], "address": words[3].split("/")[0], "mbit": speed})
    route = (run(["ip", "-4", "route", "show", "default"], 5) or "").split()
    return {"addresses": addresses, "default": route[route.index("dev") + 1] if "dev" in route else ""}


def read_tmux_limits():
    """Return the limits of a process inside tmux, which may differ from those of this SSH session."""
    if not shutil.which("tmux"):
        return None
    socket_directory = os.path.join(os.environ.get("TMUX_TMPDIR") or "/tmp", "tmux-%d" % os.getuid())
    if os.path.isdir(socket_directory) and (
        os.stat(socket_directory).st_uid != os.getuid() or os.stat(socket_directory).st_mode & 0o007
    ):  # as tmux has it
        return {
            "failed": "directory %s has unsafe permissions; on the host, run chmod 700 %s, or delete it"
            % (socket_directory, socket_directory)
        }
    folder = tempfile.mkdtemp(prefix="llama405b-doctor-")
    target = os.path.join(folder, "limits")
    server = ["tmux", "-S", os.path.join(folder, "socket"), "-f", "/dev/null"]
    script = "{ ulimit -l; ulimit -n; } >%s.part 2>&1; mv %s.part %s" % (target, target, target)
    try:
        env = {key: value for key, value in os.environ.items() if key not in ("TMUX", "TMUX_PANE")}
        text = run(server + ["new-session", "-d", "--", "sh", "-c", script], 10, env=env)
        deadline = time.time() + 5
        while not os.path.exists(target) and time.time() < deadline:
            time.sleep(0.02)
        values = read_text(target).split()
        if len(values) != 2:
            return {"failed": (text or "").strip() or "tmux wrote no limits"}
        return {"memlock_kib": values[0], "open_files": values[1]}
    finally:
        run(server + ["kill-server"], 5)
        shutil.rmtree(folder, ignore_errors=True)


def read_memory():
    """Return RAM and shared memory in bytes."""
    total, available = memory()
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "total": total or 0,
        "available": available or 0,
        "shm_free": shm.f_bavail * shm.f_frsize if shm else 0,
        "zone_reclaim": read_text("/proc/sys/vm/zone_reclaim_mode").strip() not in ("", "0"),
        "nodes": [read_node(path) for path in sorted(glob.glob("/sys/devices/system/node/node[0-9]*"))],
    }


def read_node(path):
    """Return the bytes of a NUMA node, and how many of them hold files."""
    sizes = {}
    for line in read_text(path + "/meminfo").splitlines():  # "Node 0 MemTotal:  98765 kB"
        words = line.split()
        if len(words) == 5:
            sizes[words[2].rstrip(":")] = int(words[3]) * 1024
    number = int(os.path.basename(path)[len("node") :])
    return {"number": number, "total": sizes.get("MemTotal", 0), "cached": sizes.get("FilePages", 0)}


def kills_at_logout():
    """Return whether logind kills a user's processes, including tmux, at logout."""
    value = False
    for path in ["/etc/systemd/logind.conf"] + sorted(glob.glob("/etc/systemd/logind.conf.d/*.conf")):
        for line in read_text(path).splitlines():
            key, _, text = line.strip().partition("=")
            if key.strip() == "KillUserProcesses":
                value = text.strip().lower() in ("yes", "true", "on", "1")
    return value


def read_disks(request):
    """Return filesystems that could hold weights or checkpoints, and spare drives.

    Write rates are measured where this user may write.
    """
    paths = [os.path.expanduser(path) for path in request["paths"] if path]
    checkpoint_dir = os.path.expanduser(request.get("saves") or "")
    directories = [read_directory_facts(path, request.get("rates"), path == checkpoint_dir) for path in paths]
    return {"filesystems": list_filesystems() + directories, "unmounted_nvme": list_spare_drives()}


def list_filesystems():
    """Return filesystems larger than 1 GiB, each device once."""
    entries, seen = [], set()
    for line in read_text("/proc/mounts").splitlines():
        words = line.split()
        if len(words) < 3 or words[2] not in REAL_FILESYSTEMS or words[0] in seen or not os.path.isdir(words[1]):
            continue
        seen.add(words[0])
        free, size = disk_space(words[1]) or (0, 0)
        if size > (1 << 30):
            entries.append({"mount": words[1], "type": words[2], "size": size, "free": free})
    return entries


def read_directory_facts(path, with_rates, is_checkpoint_dir):
    """Return facts about a directory that a run would write to, or about its nearest existing parent."""
    directory = nearest_existing_directory(path)
    facts = {"path": path, "free": disk_free_bytes(directory), "writable": os.access(directory, os.W_OK)}
    stat = os.statvfs(directory)
    facts["read_only"], facts["size"] = bool(stat.f_flag & os.ST_RDONLY), stat.f_blocks * stat.f_frsize
    facts["free_files"] = disk_free_files(directory)
    if facts["writable"] and not facts["read_only"]:
        facts["refuses"] = unsupported_operation(directory, is_checkpoint_dir)
    if with_rates and facts["writable"] and (facts["free"] is None or facts["free"] > 4 * PROBE_BYTES):
        facts.update(measure_write_rates(directory))
    return facts


def nearest_existing_directory(path):
    """Return a directory, or its nearest existing parent."""
    while not os.path.isdir(path) and path not in ("", "/"):
        path = os.path.dirname(path)
    return path or "/"


def write_canary(directory: str, token: str) -> str:
    """Write a canary file in a directory or its nearest existing parent; return its path, "" on failure."""
    if not directory:
        return ""
    path = os.path.join(nearest_existing_directory(os.path.abspath(directory)), canary_name(token))
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except OSError:
        return ""
    return path


def remove_canary(path: str) -> None:
    """Remove the canary file, if there is one."""
    try:
        os.unlink(path)
    except OSError:
        pass


def sees_canary(directory: str, token: str) -> bool:
    """Return whether the canary file that another host wrote for a directory is visible here."""
    directories = [os.path.abspath(directory)]
    while directories[-1] != "/":
        directories.append(os.path.dirname(directories[-1]))
    deadline = time.time() + CANARY_TIMEOUT_S
    while not any(os.path.exists(os.path.join(folder, canary_name(token))) for folder in directories):
        if time.time() > deadline:
            return False
        time.sleep(0.1)
    return True


def canary_name(token):
    """Return the name of the canary file."""
    return ".llama405b-seen-" + token.split()[-1]


def resolve_in_workdir(request, path):
    """Return the full path of a directory named in a request."""
    return os.path.join(os.path.expanduser(request["workdir"]), os.path.expanduser(path))


def list_spare_drives():
    """Return NVMe drives that are not in use."""
    mounts, drives = read_text("/proc/mounts"), []
    for path in sorted(glob.glob("/sys/block/nvme*n*")):
        name = os.path.basename(path)
        partitions = glob.glob(path + "/nvme*")
        if "/dev/" + name not in mounts and not partitions and not os.listdir(path + "/holders"):
            drives.append({"device": "/dev/" + name, "size": int(read_text(path + "/size", "0") or 0) * 512})
    return drives


def measure_write_rates(folder):
    """Measure the bytes per second written to a temporary file, with fsync."""
    block = os.urandom(1 << 20)
    try:
        handle, path = tempfile.mkstemp(prefix=".llama405b-doctor-", dir=folder)
    except OSError:
        return {}
    try:
        start = time.time()
        for _ in range(PROBE_BYTES >> 20):
            os.write(handle, block)
        os.fsync(handle)
        return {"write_per_s": PROBE_BYTES / max(time.time() - start, 1e-6)}
    except OSError:
        return {}
    finally:
        os.close(handle)
        os.unlink(path)


def check_weights(path, check_hashes=False):
    """Return which safetensors files of a checkpoint are missing, or have the wrong size or SHA-256."""
    if not path:
        return None
    path = os.path.expanduser(path)
    if not os.path.isdir(path):
        return {"path": path, "present": False}
    names, faults = list_weight_files(path)
    faults += filter(None, [safetensors_fault(path, name) for name in names])
    files = [os.path.join(path, name) for name in names]
    sizes = [os.path.getsize(file) for file in files if os.path.isfile(file)]
    has_config = os.path.isfile(os.path.join(path, "config.json"))
    facts = {"path": path, "present": has_config, "files": len(names), "bytes": sum(sizes), "faults": faults}
    if check_hashes and not faults:
        verified_hashes = read_block_hashes(path)
        facts["unhashed"] = len([name for name in names if name not in verified_hashes])
        faults += find_bad_blocks(path, names, verified_hashes)
    return facts


def list_weight_files(path):
    """Return the names of a checkpoint's tensor files, and faults of its index."""
    index = find_index(path)
    if not index:
        return ["model.safetensors"], []
    try:
        with open(os.path.join(path, index), encoding="utf-8") as file:
            names = sorted(set(json.load(file)["weight_map"].values()))
    except (ValueError, KeyError, AttributeError):
        return ["model.safetensors"], ["%s cannot be read" % index]
    return [os.path.join(os.path.dirname(index), name) for name in names], []


def find_bad_blocks(path, names, verified_hashes):
    """Return a clause per file that has changed since it was verified; ``verified_hashes``: by file, the SHA-256 of each block."""
    with concurrent.futures.ThreadPoolExecutor(N_HASH_THREADS) as pool:  # hashlib releases the GIL
        jobs = [
            (name, number, digest, pool.submit(hash_block, os.path.join(path, name), number))
            for name in names
            for number, digest in enumerate(verified_hashes.get(name, ()))
        ]
    first_bad = {}  # by file, its first bad block
    for name, number, digest, job in jobs:
        if job.result() != digest:
            first_bad.setdefault(name, number)
    return ["%s has changed since it was verified (SHA-256 of block %d)" % item for item in sorted(first_bad.items())]


def find_index(path):
    """Return the path of a checkpoint's index: its own, or that of its first part; "" if there is none."""
    name = "model.safetensors.index.json"
    shard_indices = sorted(glob.glob(os.path.join(glob.escape(path), "ranks-*-of-*", name)))
    if os.path.isfile(os.path.join(path, name)):
        return name
    if shard_indices and not os.path.isfile(os.path.join(path, "model.safetensors")):
        return os.path.relpath(shard_indices[0], path)
    return ""


def safetensors_fault(path, name):
    """Return what is wrong with a safetensors file, judging by its size and header; '' if nothing is."""
    file = os.path.join(path, name)
    try:
        actual = os.path.getsize(file)
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(min(length, 100000000)).decode())
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
    except OSError:
        return "%s is missing" % name
    except (ValueError, KeyError, TypeError, AttributeError):
        return "%s is not a safetensors file" % name
    expected = 8 + length + max(ends, default=0)
    if actual != expected:
        return "%s has %d of %d bytes" % (name, actual, expected)
    return ""


def read_block_hashes(path):
    """Return the SHA-256 of each block, by file, as download or push recorded them in a directory."""
    try:
        with open(os.path.join(path, ".llama405b-hashes.json"), encoding="utf-8") as file:
            return {name: entry["blocks"] for name, entry in json.load(file)["files"].items()}
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return {}


def hash_block(path, number):
    """Return the SHA-256 of one block of a file."""
    digest, remaining = hashlib.sha256(), BLOCK_BYTES
    with open(path, "rb") as file:
        file.seek(number * BLOCK_BYTES)
        while remaining:
            piece = file.read(min(8 << 20, remaining))
            if not piece:
                break
            digest.update(piece)
            remaining -= len(piece)
    return digest.hexdigest()


def find_leftovers():
    """Return processes of runs whose node runner is gone, by <run directory>:<host>."""
    leftovers = {}
    for value, marked_pids in marked_processes().items():
        leftover_pids = [pid for pid in marked_pids if not has_runner(pid, value)]
        if leftover_pids:
            leftovers[value] = leftover_pids
    return leftovers


def has_runner(pid: int, value: str) -> bool:
    """Return whether a process of <run directory>:<host> has a live node runner that its run knows of.

    A live node runner holds a lock. The path is the one the process sees, possibly inside a container. A lock that cannot be
    checked counts as held.
    """
    folder, _, host = value.rpartition(":")
    try:
        with open("/proc/%d/root%s/status/%s.lock" % (pid, folder, host), "rb") as lock:
            # Shared, so that two checks at the same time do not take each other for the holder.
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return _is_in_plan("/proc/%d/root%s/plan.json" % (pid, folder), host)
    return False


def _is_in_plan(path: str, host: str) -> bool:
    try:
        with open(path) as file:
            return host in [node["name"] for node in json.load(file)["nodes"]]
    except (OSError, ValueError, KeyError, TypeError):
        return True  # as far as is known


class Listener:
    """Answers every caller on a port with this host's token."""

    def __init__(self, port: int, token: str) -> None:
        self.token = token
        self.fault = ""
        self.in_use = False
        self.port = port
        self.socket = socket.socket()
        # Connections of an earlier check in TIME_WAIT must not make the port look taken.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.socket.bind(("", port))
            self.socket.listen(512)
        except OSError as error:
            self.fault = error.strerror or str(error)
            self.in_use = error.errno == errno.EADDRINUSE
            return
        self.port = self.socket.getsockname()[1]
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            try:
                caller, _ = self.socket.accept()
                caller.settimeout(CONNECT_TIMEOUT_S)
                caller.sendall(self.token.encode())
                caller.shutdown(socket.SHUT_WR)
                caller.recv(1)  # the caller closes first
                caller.close()
            except OSError:
                continue


def probe_peer(address: str, port: int, token: str) -> dict:
    """Return why a peer cannot be reached ('' if it answers with its token), and this host's address.

    The address is the one on the route to the peer.
    """
    try:
        with socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S) as link:
            local_address = link.getsockname()[0]
            reply = b""
            while len(reply) < 200:
                chunk = link.recv(200)
                if not chunk:
                    break
                reply += chunk
    except socket.timeout:
        return {"fault": "no answer within %d s" % CONNECT_TIMEOUT_S, "silent": True}
    except socket.gaierror as error:
        return {"fault": error.strerror or str(error), "unresolved": True}
    except OSError as error:
        return {"fault": error.strerror or str(error)}
    if reply.decode("utf-8", "replace") != token:
        return {"fault": "another program answers on this port"}
    return {"fault": "", "mine": local_address}


def probe_peers(peers):
    """Try every address and port of every peer, many in parallel."""
    results, jobs = {}, []
    for peer in peers:
        results[peer["name"]] = {"resolves": None, "reached": {}}
        for priority, address in enumerate(peer["addresses"]):
            jobs.append((priority, peer, address))
    jobs.sort(key=lambda job: -job[0])  # every peer's first address first: jobs are taken from the end
    lock, pending = threading.Lock(), list(jobs)

    def probe_pending():
        while True:
            with lock:
                if not pending:
                    return
                _, peer, address = pending.pop()
            for port in peer["ports"]:
                result = probe_peer(address, port, peer["token"])
                with lock:
                    results[peer["name"]]["reached"]["%s:%d" % (address, port)] = result
                if result.get("silent"):  # nor would it answer on another port
                    break

    def resolve(peer):
        start = time.time()
        try:
            address = socket.gethostbyname(peer["name"])
        except OSError:
            address = ""
        results[peer["name"]]["resolves"] = [address, round(time.time() - start, 2)]

    threads = [threading.Thread(target=probe_pending, daemon=True) for _ in range(min(128, len(jobs) or 1))]
    threads += [threading.Thread(target=resolve, args=(peer,), daemon=True) for peer in peers]
    for thread in threads:
        thread.start()
    deadline = time.time() + 14
    for thread in threads:
        thread.join(max(0, deadline - time.time()))
    with lock:
        return json.loads(json.dumps(results))


def main():
    """Answer one doctor request."""
    request = json.loads(sys.stdin.buffer.readline().decode())
    os.umask(0o077)
    directory = resolve_in_workdir(request, request["mark"]) if request.get("mark") else ""
    canary = write_canary(directory, request["token"])
    try:
        print_facts(request, directory if canary else "")
    finally:
        remove_canary(canary)


def print_facts(request, canary_directory):
    """Print the facts, then how the peers are reached."""
    listeners = [Listener(request["port"], request["token"]), Listener(0, request["token"])]
    facts = gather_facts(
        {
            "identity": read_identity,
            "environment": lambda: read_environment(request),
            "gpus": read_nvidia_smi,
            "rdma": read_rdma,
            "network": read_network,
            "tmux": read_tmux_limits,
            "memory": read_memory,
            "disks": lambda: read_disks(request),
            "weights": lambda: check_weights(request.get("weights"), request.get("hash")),
            "leftovers": find_leftovers,
            "kill_user_processes": kills_at_logout,
        },
        request.get("within_s", 40),
    )
    facts["port_fault"] = listeners[0].fault
    facts["ports"] = [listener.port for listener in listeners if not listener.fault]
    facts["marked"] = canary_directory
    facts["now"] = time.time()
    print(json.dumps(facts), flush=True)
    if select.select([sys.stdin], [], [], 3600)[0]:  # all other hosts may have their turn first
        print_peer_facts(request)


def gather_facts(probes, within_s):
    """Run all parts in parallel, return their results; None, with the reason in ``failed``, for a part that fails or is too slow."""
    facts, failed = {}, {}

    def run_probe(name):
        try:
            facts[name] = probes[name]()
        except Exception as error:  # one fact that is not available must not cost the others
            facts[name] = None
            failed[name] = "%s: %s" % (type(error).__name__, error)

    threads = [threading.Thread(target=run_probe, args=(name,), daemon=True) for name in probes]
    for thread in threads:
        thread.start()
    deadline = time.time() + within_s
    for thread in threads:
        thread.join(max(0, deadline - time.time()))
    for name in probes:
        if name not in facts:
            facts[name] = None
            failed[name] = "no answer in time"
    facts["failed"] = dict(failed)
    return facts


def print_peer_facts(request):
    """Read which hosts to reach, and print the results."""
    line = sys.stdin.buffer.readline().decode()
    if not line:
        return
    peer_request = json.loads(line)
    facts = {"peers": probe_peers(peer_request["peers"])}
    if peer_request.get("mark"):
        facts["sees"] = sees_canary(resolve_in_workdir(request, peer_request["mark"]), peer_request["token"])
    print(json.dumps(facts), flush=True)
    select.select([sys.stdin], [], [], 30)  # others may still be calling
    sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
