"""What `scripts/demo` runs once everything is installed."""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.panel import Panel
from rich.table import Table
from rich.text import Text

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.demo_fleet import run_fleet
from scripts.demo_nodes import (
    ENDING,
    HOST,
    DemoError,
    NodeProcess,
    check_free,
    logs_kept_on_failure,
    notes,
    prfaas,
    results,
    served_model,
    start,
    wait_ready,
)

TEXTS = Path(__file__).parent / "texts"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; return its exit status."""
    options = parse(arguments)
    for signal_number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(signal_number, ENDING.receive)
    try:
        run(options)
    except DemoError as error:
        notes.print(Text(f"scripts/demo: {error}"))
        return 1
    except KeyboardInterrupt:
        notes.print("stopped")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description="Start a prefill node and a pd node here and send them a short and a long prompt.",
    )
    parser.add_argument("--once", action="store_true", help="exit after the two answers")
    parser.add_argument(
        "--fleet", action="store_true", help="show a scheduler with four nodes that replay profiles"
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--port", type=int, default=8000, help="of the pd node (8000)")
    parser.add_argument("--prefill-port", type=int, default=8100, help="of the prefill node (8100)")
    parser.add_argument(
        "--model", default="gemma-3-270m", help="name or path of what both serve (gemma-3-270m)"
    )
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    """Start both nodes, ask both questions, and serve on unless told `--once`; or show a fleet."""
    if options.fleet:
        run_fleet(options)
        return
    if shutil.which("curl") is None:
        raise DemoError("needs curl, which sends the prompts")
    for port, flag in ((options.port, "--port"), (options.prefill_port, "--prefill-port")):
        check_free(port, flag)
    fetch_model(options.model)
    with nodes(options) as (prefill, pd):
        wait_ready((prefill, pd), needs_peers=True)
        model = served_model(pd)
        requests = [ask(pd, model, name, messages) for name, messages in conversations()]
        results.print(f"\nTry it:\n{curl_line(pd, model)}", soft_wrap=True)
        if options.json:
            print(json.dumps({"requests": requests}), flush=True)
        if not options.once:
            notes.print("Serving until Ctrl-C.")
            while True:
                prefill.check_running()
                pd.check_running()
                ENDING.wait(1)


def fetch_model(model: str) -> None:
    """Bring a model that is named, not given as a path; quick if it is here."""
    if Path(model).exists():
        return
    done = subprocess.run(prfaas("model", "fetch", model), stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise DemoError(f"could not get the model {model}")


@contextmanager
def nodes(options: argparse.Namespace) -> Iterator[tuple[NodeProcess, NodeProcess]]:
    """Run both nodes for the length of the block; their logs stay if it fails."""
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    common = ("--model", options.model, "--threads", str(threads))
    peer = f"{HOST}:{options.prefill_port}"
    with logs_kept_on_failure() as logs, ExitStack() as running:
        prefill = start(
            running, "prefill", options.prefill_port, logs, ("--role", "prefill", *common)
        )
        pd = start(running, "pd", options.port, logs, ("--role", "pd", "--peer", peer, *common))
        yield prefill, pd


def conversations() -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Yield a short and a long prompt, each with a name to show."""
    yield "short", [{"role": "user", "content": "What is the capital of France?"}]
    text = (TEXTS / "selm_point.txt").read_text(encoding="utf-8")
    question = "Who was the first woman to be principal keeper?"
    yield "long", [{"role": "system", "content": text}, {"role": "user", "content": question}]


def ask(node: NodeProcess, model: str, name: str, messages: list[dict[str, str]]) -> dict[str, Any]:
    """Send one chat prompt with curl, show the answer and its story, and return the story."""
    settings = {"model": model, "max_tokens": 48, "temperature": 0, "stop": ["\n"]}
    body = json.dumps({"messages": messages, **settings})
    command = ["curl", "--silent", "--show-error", "--max-time", "900", "--data-binary", "@-"]
    command += ["--header", "Content-Type: application/json", f"{node.url}/v1/chat/completions"]
    with notes.status(f"{name} prompt"):
        done = subprocess.run(command, input=body.encode(), capture_output=True, check=False)
    if done.returncode:
        node.check_running()
        raise DemoError(f"curl: {done.stderr.decode(errors='replace').strip()}")
    try:
        answer = json.loads(done.stdout)
        usage = answer["usage"]
        story = {"prompt_tokens": usage["prompt_tokens"]}
        story |= {key: usage["prfaas"][key] for key in ("route", "reason", *COUNTS, "ttft_s")}
        story["answer"] = answer["choices"][0]["message"]["content"].strip()
    except (ValueError, KeyError, TypeError, IndexError) as error:
        node.check_running()
        raise DemoError(f"unexpected answer: {done.stdout[:500]!r}") from error
    show(name, messages[-1]["content"], story)
    return story


COUNTS = ("tokens_reused", "tokens_local", "tokens_remote", "bytes_received")


def show(name: str, question: str, story: dict[str, Any]) -> None:
    table = Table.grid(padding=(0, 2))
    rows = {
        "question": question,
        "answer": story["answer"],
        "prompt": f"{story['prompt_tokens']:,} tokens",
        "route": f"{story['route']} ({story['reason']})",
        "prefill": f"{story['tokens_reused']:,} tokens reused, {story['tokens_local']:,} computed here,"
        f" {story['tokens_remote']:,} computed by the peer",
        "received": f"{story['bytes_received'] / 1e6:,.1f} MB of KVCache",
        "first token": f"after {story['ttft_s']:.2f} s",
    }
    for label, value in rows.items():
        table.add_row(Text(label, style="dim"), Text(value))
    results.print(Panel(table, title=f"{name} prompt", title_align="left"))


def curl_line(node: NodeProcess, model: str) -> str:
    question = [{"role": "user", "content": "Who wrote Hamlet?"}]
    body = json.dumps({"model": model, "messages": question})
    return f"curl {node.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"


if __name__ == "__main__":
    sys.exit(main())
