"""How much memory a restore to a file takes at its peak: python -m tests.cli.peak URL TO [OPTION...].

`python -m tests.cli.peak WORD...` does the same for another command, beside what torch takes.

Prints the growth of this process's anonymous memory, in bytes, over what it was before. (Pages of mapped files do not
count: the kernel takes them back when it needs them.)
"""

from __future__ import annotations

import sys
from pathlib import Path

from ckpt.cli.main import make_app
from ckpt.threads import Tasks
from tests.cli.stores import a_run


def anonymous_bytes() -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.partition("RssAnon:")[2].split()[0])


def main() -> None:
    if sys.argv[1] in ("import", "restore"):
        __import__("torch.distributed.checkpoint")
        make_app(sys.argv[1:])
        print(peak_of(sys.argv[1:]))
        return
    url, to, *options = sys.argv[1:]
    warm = Path(to).with_name("warm")
    a_run(warm / "run")
    words = ["restore", str(warm / "run"), "--to", str(warm / Path(to).name), *options]
    make_app(["restore"])(words, standalone_mode=False)  # imports
    print(peak_of(["restore", url, "--to", to, *options]))


def peak_of(words: list[str]) -> int:
    app = make_app(words)
    before = peak = anonymous_bytes()
    with Tasks("peak") as tasks:

        def watch() -> None:
            nonlocal peak
            while not tasks.stopping.wait(0.002):
                peak = max(peak, anonymous_bytes())

        tasks.start("watch", watch)
        app(words, standalone_mode=False)
    return peak - before


if __name__ == "__main__":
    main()
