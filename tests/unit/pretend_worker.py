"""A role worker without a model. `PRETEND_<METHOD>` in its environment is evaluated as the answer to a method, with `args`, `name`,
`calls` (all calls so far) and `worker` at hand; other methods answer None."""

import os
import sys
import time  # noqa: F401  (for the expressions)

from dynarl.roles.worker import Worker, main


class PretendWorker(Worker):
    role = "pretended"

    def __init__(self, *args):
        super().__init__(*args)
        self.calls = []

    def __getattr__(self, attribute):
        if not attribute.startswith("do_"):
            raise AttributeError(attribute)
        method = attribute.removeprefix("do_")

        def answer(**args):
            self.calls.append((method, args))
            expression = os.environ.get(f"PRETEND_{method.upper()}", "None")
            return eval(expression, globals() | {"args": args, "name": self.name, "calls": self.calls, "worker": self})  # noqa: S307

        return answer

    def do_calls(self):
        return self.calls

    def do_die(self):
        os._exit(9)


if __name__ == "__main__":
    sys.argv[1:3] = []  # -m dynarl.roles.<role>.worker
    main(PretendWorker)
