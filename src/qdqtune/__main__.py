"""`qdqtune`, and `python -m qdqtune`: Ctrl-C ends it quietly from its first moment on."""

import os
import signal
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line. While it is being imported there is nothing to put away yet."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from qdqtune.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
