"""`qdqtune`, and `python -m qdqtune`: Ctrl-C ends it quietly from its first moment on."""

import os
import signal
import sys
import threading


def main() -> None:
    """Run the command line. While it is being imported there is nothing to put away yet."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from qdqtune.cli.main import main as run
    from qdqtune.system.interpreter import USER_CODE

    try:
        run()
    except SystemExit as end:
        if any(thread.name.startswith(USER_CODE) for thread in threading.enumerate()):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(int(end.code or 0))  # Python would wait for threads that this code has started
        raise


if __name__ == "__main__":
    main()
