"""Start a real sglang engine, generate greedily, write JSON.

    python run_engine.py SERVER_ARGS.json ANSWERS.json

SERVER_ARGS.json holds fields of sglang's ServerArgs; what is asked comes from `questions`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time

import questions


def main() -> None:
    args_file, answers_file = sys.argv[1:3]
    with open(args_file) as file:
        wanted = json.load(file)
    import sglang
    from sglang.srt.server_args import ServerArgs

    known = {field.name for field in dataclasses.fields(ServerArgs)}
    if unknown := wanted.keys() - known:
        raise SystemExit(f"this host has no server argument {sorted(unknown)}")
    start = time.time()
    engine = sglang.Engine(**wanted)
    up = time.time() - start
    print(f"ENGINE UP after {up:.0f} s", flush=True)
    answers = []
    for prompts in questions.BATCHES:
        answers += engine.generate(input_ids=prompts, **questions.options())
    with open(answers_file, "w") as file:
        json.dump({"seconds_up": up, "answers": [questions.tidy(a) for a in answers]}, file)
    print("ENGINE DONE", flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
