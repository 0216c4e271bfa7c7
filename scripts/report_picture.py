"""Look at a report's page in a real browser, dark and light: it must load nothing, raise nothing, and read values at the pointer.

    .venv/bin/python scripts/report_picture.py runs/RUN/report.html OUT.png

writes OUT.png, and OUT-dark.png beside it. Needs chromium (`apt-get install chromium`).
"""

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

BROWSER = [
    "chromium",
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--enable-logging=stderr",
    "--v=0",
]
POINTS = """<script>
const chart = document.querySelector("svg[data-axis]"), box = chart.getBoundingClientRect();
chart.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + box.width / 2, clientY: box.top + 20 }));
document.body.dataset.loaded = performance.getEntriesByType("resource").length;
</script>"""


def main() -> int:
    """Take the pictures, and check the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", default="1040,1180", help="of the picture [1040,1180]")
    args = parser.parse_args()
    html = args.page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as scratch:
        pointed = Path(scratch) / "pointed.html"
        pointed.write_text(html.replace("</body>", POINTS + "</body>"), encoding="utf-8")
        seen = _browse("--dump-dom", pointed)
    if errors := re.findall(r"CONSOLE.*", seen.stderr):
        raise SystemExit(f"{args.page}: the browser says {errors[0]}")
    at = re.search(r'<div id="at"[^>]*>([^<]*)</div>', seen.stdout)
    if not (at and at[1].startswith("step") and 'data-loaded="0"' in seen.stdout):
        raise SystemExit(f"{args.page}: no values at the pointer, or something was loaded: {at and at[1]!r}")
    for scheme, path in (("1", args.out), ("0", args.out.with_stem(f"{args.out.stem}-dark"))):
        options = (
            f"--window-size={args.size}",
            f"--blink-settings=preferredColorScheme={scheme}",
            f"--screenshot={path}",
        )
        _browse(*options, args.page)
        print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")
    print(f"at the pointer: {at[1]}")
    return 0


def _browse(*options: str | Path) -> subprocess.CompletedProcess[str]:
    *flags, page = options
    words = [*BROWSER, *map(str, flags), Path(page).absolute().as_uri()]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)


if __name__ == "__main__":
    raise SystemExit(main())
