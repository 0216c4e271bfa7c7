"""cluster-top in a browser: the page, its token, the same screen, and that nothing stays."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys

import aiohttp
import pytest

from conftest import ROOT
from llama405b_tools.agent import processes
from ops_rig import wait_for

ENV = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}", "PATH": os.environ["PATH"]}
TOP = [sys.executable, "-m", "llama405b_tools.cli", "top"]


@pytest.fixture
def serve(tmp_path):
    """Serve the simulated incident; returns the process and the address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    argv = [*TOP, "--serve", port, "--replay", "demo", "--speed", "4"]
    with (tmp_path / "said").open("w") as said:
        server = subprocess.Popen(list(map(str, argv)), cwd=tmp_path, env=ENV, stdout=said, stderr=said)
    found = wait_for(lambda: re.search(r"open (http://\S+) in a browser", (tmp_path / "said").read_text()), 60)
    yield server, found[1]
    server.send_signal(signal.SIGTERM)
    assert server.wait(60) == 0


async def _look(url, server):
    async with aiohttp.ClientSession() as client:

        async def get(address):
            async with client.get(address) as response:
                return response.status, await response.text()

        root = url.rsplit("/", 2)[0]
        assert [(await get(f"{root}{path}"))[0] for path in ("/", "/ws", "/static/js/textual.js", "/x/ws")] == [404] * 4
        status, page = await get(url)
        assert status == 200
        links = re.findall(r'(?:href|src)="(http[^"]+)"', page)
        assert len(links) == 2
        assert all(link.startswith(url) for link in links)  # nothing comes from elsewhere
        assert [(await get(link))[0] for link in links] == [200, 200]
        socket_url = re.search(r'websocket-url="([^"]+)"', page)[1]
        for origin in ("http://elsewhere.example", "null"):
            with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
                await client.ws_connect(socket_url, origin=origin)
        async with client.ws_connect(socket_url + "?width=120&height=40", origin=root) as screen:

            async def shows(pattern, seen=b""):
                while not re.search(pattern, seen):
                    message = await asyncio.wait_for(screen.receive(), 60)
                    assert message.type is aiohttp.WSMsgType.BINARY, message
                    seen = (seen + message.data)[-200_000:]
                return seen

            await shows(rb"HEALTHY")
            assert len(processes.find_descendants(server.pid)) == 1  # for this browser
            await screen.send_json(["stdin", "S"])
            await shows(rb"--read-only")
            await screen.send_json(["resize", {"width": 80, "height": 24}])
            await shows(rb"\x1b\[24;1H")


def test_the_screen_is_shown_to_who_knows_the_token(serve):
    server, url = serve
    asyncio.run(_look(url, server))
    wait_for(lambda: processes.find_descendants(server.pid) == [], 20)  # the browser was closed


@pytest.mark.parametrize("args", [["--serve", "x"], ["--serve", "8405", "--once"], ["--serve", "1.2.3.4:8405"]])
def test_what_cannot_be_served_is_refused(tmp_path, args):
    done = subprocess.run(
        [*TOP, "--replay", "demo", *args],
        cwd=tmp_path,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
