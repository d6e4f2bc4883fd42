#!/usr/bin/env python3
"""Pictures of the sample report, light and dark, wide and narrow: to be looked at after a change of its looks.

    pip install pillow
    python reference/screenshot_report.py reference/report [PAGE] [CHROMIUM]

Takes tests/golden/report/report.html as it is, says what sticks out of the page at its right, and writes
{light,dark}-{1280,390}.png. The tests compare pages byte for byte; pictures differ between versions of a browser and
are there for people.
"""

import html
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
MEASURE = """<script>addEventListener('load', () => {
  const wide = [...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll') &&
    e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.outerHTML.slice(0, 160));
  parent.postMessage(JSON.stringify([document.documentElement.scrollHeight, wide]), '*') })</script>"""
HEAR = """<script>addEventListener('message', e => {
  document.body.appendChild(document.createElement('pre')).textContent = e.data })</script>"""


def run(browser, folder, *options):
    base = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--allow-file-access-from-files"]
    command = [browser, *base, f"--user-data-dir={folder}/profile", *options, f"file://{folder}/outer.html"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def framed(folder, page, width, height, before=""):
    # A browser's window has a least width, so narrow pages stand in a frame.
    (folder / "inner.html").write_text(page)
    frame = f'<iframe src="inner.html" style="border:0;width:{width}px;height:{height}px"></iframe>'
    (folder / "outer.html").write_text(f'<!doctype html>{before}<body style="margin:0;overflow:hidden">{frame}')


def main():
    out = Path(sys.argv[1])
    page = Path(sys.argv[2] if len(sys.argv) > 2 else ROOT / "tests/golden/report/report.html").read_text()
    browser = sys.argv[3] if len(sys.argv) > 3 else "chromium"
    out.mkdir(parents=True, exist_ok=True)
    for width in (1280, 390):
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            framed(folder, page.replace("</body>", MEASURE + "</body>"), width, 800, HEAR)
            heard = run(browser, folder, "--virtual-time-budget=3000", "--dump-dom")
            height, wide = json.loads(html.unescape(re.search(r"<pre>(.*?)</pre>", heard, re.S).group(1)))
            for element in wide:
                print(f"at {width} sticks out: {element}")
            for name in ("light", "dark"):
                # The colours without asking the system for them.
                query, picture = "@media (prefers-color-scheme: dark)", folder / "picture.png"
                framed(folder, page.replace(query, "@media all" if name == "dark" else "@media not all", 1), width, height)
                run(browser, folder, f"--window-size={max(width, 500)},{height}", f"--screenshot={picture}")
                image = Image.open(picture).convert("RGB").crop((0, 0, width, height))
                target = out / f"{name}-{width}.png"
                image.quantize(256, dither=Image.Dither.NONE).save(target, optimize=True)
                print(target, image.size, target.stat().st_size, "bytes")


main()
