"""The SGLang server as a child of the rollout worker: `python -m dynarl.roles.rollout.sglang_server SGLANG-ARGS...`

The same as `python -m sglang.launch_server` but for two things: it dies with the worker, and it takes its API key from the
environment, where other users of the node cannot read it as they can a command line.
"""

from __future__ import annotations

import logging
import os
import sys

from dynarl.parent import die_with_parent

KEY_VARIABLE = "DYNARL_SGLANG_KEY"


def main() -> None:
    die_with_parent()
    if os.getppid() == 1:
        sys.exit("the worker that started this server is gone")
    key = os.environ.pop(KEY_VARIABLE)

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    # It tries this before it listens, and then prints a page that looks like the reason of whatever fails next. The engine
    # asks for it when the server is ready.
    logging.getLogger("sglang.srt.entrypoints.http_server").addFilter(lambda record: "freeze_gc failed" not in record.getMessage())
    load_plugins()
    arguments = prepare_server_args([*sys.argv[1:], "--api-key", key])
    try:
        run_server(arguments)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


# SGLang starts its scheduler by multiprocessing "spawn", which imports this module again.
if __name__ == "__main__":
    main()
