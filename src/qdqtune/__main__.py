"""`qdqtune`, and `python -m qdqtune`: Ctrl-C ends it quietly from its first moment on.

With the flag --onnx_path and no command it is the program of `autotune.quantization`, whose names are here as well.
"""

import os
import signal
import sys
import threading
from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name not in ("get_parser", "quantize"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("qdqtune.autotune.quantization"), name)


def main() -> None:
    """Run the command line. While it is being imported there is nothing to put away yet."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    flags = [argument.replace("_", "-") for argument in sys.argv[1:]]
    if flags and flags[0].startswith("-") and any(flag.startswith("--onnx-path") for flag in flags):
        from qdqtune.autotune import quantization
        from qdqtune.autotune.__main__ import exit_code

        work = globals().get("quantize", quantization.quantize)
        if code := exit_code(lambda: quantization.main(work=work)):
            sys.exit(code)
        return
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
