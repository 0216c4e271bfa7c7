"""An SSH server in this process, on a free port of loopback: it can drop who comes, and has any login shell one likes."""

import contextlib
import signal
import socket
import subprocess
import threading

import paramiko


class Server(paramiko.ServerInterface):
    """``drops``: how many connections it ends at once, saying ``words``. ``shell``: what runs instead of every command."""

    def __init__(self, directory, name, *, drops=0, words=b"", shell=("sh", "-c", 'exec sh -c "$0"')):
        self.drops, self.words, self.shell, self.seen = drops, words, shell, 0
        self.key = paramiko.Ed25519Key.from_private_key_file(_new_key(directory / f"{name}-host"))
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        (directory / f"{name}-known").write_text(
            f"[127.0.0.1]:{self.port} {self.key.get_name()} {self.key.get_base64()}\n"
        )
        self.config = (
            f"Host {name}\n  HostName 127.0.0.1\n  Port {self.port}\n  IdentityFile {_new_key(directory / name)}\n"
            f"  IdentitiesOnly yes\n  UserKnownHostsFile {directory}/{name}-known\n"
        )
        self.open = []
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                client = self.socket.accept()[0]
                self.seen += 1
                if self.seen <= self.drops:
                    client.sendall(self.words)
                    client.close()
                    continue
                transport = paramiko.Transport(client)
                transport.add_server_key(self.key)
                self.open.append(transport)
                with contextlib.suppress(paramiko.SSHException, EOFError):
                    transport.start_server(server=self)

    def close(self):
        self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which must not accept for a later server
        self.thread.join()
        for each in (self.socket, *self.open):
            each.close()

    def get_allowed_auths(self, username):
        return "publickey"

    def check_auth_publickey(self, username, key):
        return paramiko.AUTH_SUCCESSFUL

    def check_channel_request(self, kind, chanid):
        return paramiko.OPEN_SUCCEEDED

    def check_channel_direct_tcpip_request(self, chanid, origin, destination):
        """A way to nowhere: whoever goes there is dropped."""
        threading.Timer(0.05, lambda: [channel.close() for each in self.open for channel in _channels(each)]).start()
        return paramiko.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel, command):
        answered = threading.Event()
        transport, send = channel.transport, channel.transport._send_user_message

        def answer(message):
            transport._send_user_message = send
            send(message)
            answered.set()

        transport._send_user_message = answer  # as sshd, which lets a command end only after it said that it begins
        threading.Thread(target=self._run, args=(channel, command.decode(), answered), daemon=True).start()
        return True

    def _run(self, channel, command, answered):
        pipe = subprocess.PIPE
        answered.wait(10)
        with subprocess.Popen([*self.shell, command], stdin=pipe, stdout=pipe, stderr=pipe) as child:
            threading.Thread(target=_feed, args=(channel, child), daemon=True).start()
            errors = threading.Thread(target=_pass_on, args=(child.stderr, channel.sendall_stderr), daemon=True)
            errors.start()
            _pass_on(child.stdout, channel.sendall)
            child.kill()
            errors.join(1)
        with contextlib.suppress(OSError, EOFError):
            if (code := child.wait()) != -signal.SIGTERM:  # sshd has no status for what a signal ended
                channel.send_exit_status(code & 255)
            channel.close()


def _pass_on(pipe, send):
    with contextlib.suppress(OSError, EOFError):
        while data := pipe.read1(1 << 16):
            send(data)


def _feed(channel, child):
    with contextlib.suppress(OSError):
        while data := channel.recv(1 << 16):
            child.stdin.write(data)
            child.stdin.flush()
    with contextlib.suppress(OSError):
        child.stdin.close()


def _channels(transport):
    return list(transport._channels.values())


def _new_key(path):
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
    return str(path)
