"""One invocation from arguments to exit status: session, command, printing; never a traceback."""

from __future__ import annotations

import io
import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence

from kv_canary.cli.bench import run_bench
from kv_canary.cli.client import DEFAULT_TIMEOUT_SECONDS, Client
from kv_canary.cli.demo import run_demo
from kv_canary.cli.faults import run_faults
from kv_canary.cli.parser import UsageError, build_parser
from kv_canary.cli.render import Style, plain
from kv_canary.cli.session import CLEAN, INTERRUPTED, TROUBLE, Outcome, Session, Surroundings
from kv_canary.errors import CommandError, KVCanaryError, SettingsError
from kv_canary.settings import PREFIX, Settings


def main(argv: list[str] | None = None) -> int:
    """Runs `kv-canary` with `argv` (default: the process's own) and gives the exit status."""
    return run(sys.argv[1:] if argv is None else argv, Surroundings())


def run(argv: Sequence[str], surroundings: Surroundings) -> int:
    """`main` with its surroundings named."""
    if argv[:1] == ["demo"]:
        return _guarded(lambda: run_demo(argv[1:]), surroundings, as_json=False)
    if argv[:1] == ["bench"]:
        return _guarded(lambda: run_bench(argv[1:], surroundings), surroundings, as_json="--json" in argv)
    if argv[:1] == ["faults"]:
        return _guarded(lambda: run_faults(argv[1:], surroundings), surroundings, as_json="--json" in argv)
    for stream in (surroundings.stdout, surroundings.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a name that the terminal cannot spell is no reason to fail
    return _guarded(lambda: _ask(argv, surroundings), surroundings, as_json="--json" in argv)


def _guarded(work: Callable[[], int], surroundings: Surroundings, *, as_json: bool) -> int:
    """Turns every way out of `work` into an exit status and at most a few lines on stderr."""
    try:
        return work()
    except SystemExit as leaving:  # --help and --version, here or in the demo
        return leaving.code if isinstance(leaving.code, int) else CLEAN if leaving.code is None else TROUBLE
    except KeyboardInterrupt:
        if as_json:
            print(json.dumps({"error": "interrupted"}), file=surroundings.stdout)
        return INTERRUPTED
    except KVCanaryError as error:
        if as_json:
            http_status = error.status if isinstance(error, CommandError) else None
            print(json.dumps({"error": str(error), "http_status": http_status}, indent=2), file=surroundings.stdout)
        what, *hints = str(error).splitlines()
        print(f"kv-canary: {plain(what)}", *(f"  {plain(hint)}" for hint in hints), sep="\n", file=surroundings.stderr)
        return TROUBLE


def _ask(argv: Sequence[str], surroundings: Surroundings) -> int:
    arguments = build_parser().parse_args(argv)
    if not hasattr(arguments, "run"):
        raise UsageError(
            "demo, bench and faults take their options after their names\nfor example: kv-canary demo --help"
        )
    session = _session(arguments, surroundings)
    try:
        outcome: Outcome = arguments.run(arguments, session)
    except KVCanaryError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise KVCanaryError(
            f"this command does not understand the answer of {session.client.url} ({type(error).__name__}: {error})\n"
            "compare kv-canary --version with the version in the server's environment"
        ) from error
    try:
        if outcome.document is not None:
            text = json.dumps(outcome.document, indent=2) if session.json else "\n".join(outcome.lines)
            print(text, file=surroundings.stdout)
        surroundings.stdout.flush()
    except BrokenPipeError:
        # The reader (head, a pager) has enough. Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), surroundings.stdout.fileno())
    except OSError as error:
        raise KVCanaryError(f"cannot write the answer: {error.strerror}\ncheck where stdout goes") from error
    return outcome.status


def _session(arguments: Namespace, surroundings: Surroundings) -> Session:
    url, token_file = arguments.url, arguments.token_file
    if url is None or token_file is None:
        try:
            settings = Settings.from_environment(surroundings.environment)
        except SettingsError:
            # A setting that is wrong here is no reason to keep somebody from looking at a server that is named.
            if url is None:
                raise
        else:
            url, token_file = url or _own_url(settings), token_file or settings.token_file
    timeout = DEFAULT_TIMEOUT_SECONDS if arguments.timeout is None else arguments.timeout
    if getattr(arguments, "wait", False):
        timeout = min(timeout, DEFAULT_TIMEOUT_SECONDS)  # then --timeout limits the whole, not each question
    return Session(
        client=Client(url, token_file=token_file, timeout_seconds=timeout),
        surroundings=surroundings,
        style=Style.of(surroundings.stdout, surroundings.environment),
        json=arguments.json,
    )


def _own_url(settings: Settings) -> str:
    if settings.port == 0:
        raise SettingsError(PREFIX + "PORT", 0, "the port that the server logged at its start, or --url")
    host = settings.host.strip("[]")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"
