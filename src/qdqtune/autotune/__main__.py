"""`python -m qdqtune.autotune`: Ctrl-C ends it quietly from its first moment on."""

from __future__ import annotations

import os
import signal


def run_autotune() -> int:
    """Run the command with the arguments of the program. Gives the exit code."""
    return exit_code(main)


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # while it is being imported
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from qdqtune.autotune.command import main

    main()
else:
    from qdqtune.autotune.command import exit_code, main
    from qdqtune.autotune.command import get_parser as get_parser
    from qdqtune.autotune.utils import DEFAULT_NUM_SCHEMES as DEFAULT_NUM_SCHEMES
    from qdqtune.autotune.utils import DEFAULT_TIMING_RUNS as DEFAULT_TIMING_RUNS
    from qdqtune.autotune.utils import DEFAULT_WARMUP_RUNS as DEFAULT_WARMUP_RUNS
    from qdqtune.autotune.utils import MODE_PRESETS as MODE_PRESETS
    from qdqtune.autotune.utils import apply_mode_presets as apply_mode_presets
