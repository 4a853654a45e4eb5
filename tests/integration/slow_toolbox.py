"""The task tools with calls that take their time and leave a line in a file, also those of tools that are not there."""

import sys
import time

from dynarl.tasks.toolbox import Toolbox


class SlowToolbox(Toolbox):
    def __init__(self, args, seed):
        self.log = args["log"]
        super().__init__({name: value for name, value in args.items() if name != "log"}, seed)

    def parse_call(self, turn):
        if not any(arg.endswith("-environment-0") for arg in sys.argv):  # that one makes demonstrations
            with open(self.log, "a") as file:
                file.write(f"{turn!r}\n")
            time.sleep(0.15)
        return super().parse_call(turn)
