"""A task with one tool that leaves a line in a file each time that it is really called."""

import os
import time

from dynarl.tasks.base import Score, Task
from dynarl.tasks.tools.base import Tool


class Wait(Tool):
    """`wait 0.5`: an answer after half a second; `wait go`: when the file `<log>.go` is there; `wait die`: the process
    ends."""

    def __init__(self, log):
        self.log = log

    def call(self, arguments, session):
        with open(self.log, "a") as file:
            file.write(f"{arguments}\n")
        if arguments == "die":
            os._exit(7)
        if arguments == "go":
            while not os.path.exists(f"{self.log}.go"):
                time.sleep(0.01)
        else:
            time.sleep(float(arguments))
        session["calls"] = session.get("calls", 0) + 1
        return f"ok {session['calls']}"


class Waiting(Task):
    def __init__(self, args, seed):
        super().__init__(args, seed)
        self.log = args["log"]

    def question(self, split, index):
        return f"{index}"

    def verify(self, split, index, response):
        return Score(float("ok" in response), "ok" in response)

    def demonstration(self, index):
        return f"{index}", ["<call>wait 0</call>", "<call>wait 0.0</call>", "end"]

    def tools(self):
        return {"wait": Wait(self.log)}

    def symbols(self):
        return [
            "<call>",
            "</call>",
            "<result>",
            "</result>",
            "wait ",
            "ok ",
            "die",
            "go",
            "end",
            "error: ",
            "no answer",
            *"0123456789.",
        ]
